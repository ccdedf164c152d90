"""Load the tokenizer of a model directory, so that tokenizer.json alone decides token ids and text.

`AutoTokenizer` of transformers chooses a class by the names in tokenizer_config.json and config.json. Since
transformers 5 many classes (LlamaTokenizer, Qwen2Tokenizer, GPT2Tokenizer, ...) take only the vocabulary from
tokenizer.json. They build normalizer, pre-tokenizer and decoder themselves. For example, a checkpoint that splits
digits then gets other tokens than those of its training, and these depend on the version of transformers. The class
that uses tokenizer.json without changes gives the same tokens everywhere.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from sarathi_pp.errors import InputError, StoppedError, UnsafeError

# Special tokens for which each class has its own default. It applies unless a file names the token, or null.
_NAMED_BY_CLASS = ("bos_token", "eos_token")


def load_backend(model_dir: Path) -> Any:
    """Return the transformers tokenizer of a directory that has tokenizer files.

    Raises:
        InputError: the files cannot be loaded as a tokenizer.
        UnsafeError: the tokenizer is Python code in the model directory.
    """
    try:
        return _load(model_dir)
    except StoppedError:
        raise
    except Exception as error:  # the library raises many kinds of errors for a bad file
        if "trust_remote_code" in str(error):
            raise UnsafeError(f"the tokenizer in {model_dir} is Python code of its own, which is not run") from error
        raise InputError(f"the tokenizer in {model_dir} cannot be loaded: {error}") from error


def _load(model_dir: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    if not (model_dir / "tokenizer.json").exists():
        return _load_by_class(model_dir)
    named = _read_object(model_dir / "tokenizer_config.json")
    if "auto_map" in named:
        _load_by_class(model_dir)  # raises an error unless transformers can load it without the code
    backend = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    named |= _read_object(model_dir / "special_tokens_map.json")
    missing = [name for name in _NAMED_BY_CLASS if name not in named]
    if missing:
        with suppress(Exception):  # the class may not support this vocabulary
            by_class = _load_by_class(model_dir)
            known = backend.get_vocab()
            for name in missing:
                if getattr(by_class, name) in known:
                    setattr(backend, name, getattr(by_class, name))
    return backend


def _load_by_class(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; empty if there is no such file, or no object in it."""
    if not path.exists():
        return {}
    record = json.loads(path.read_bytes())
    return record if isinstance(record, dict) else {}
