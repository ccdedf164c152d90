"""The identity of one start of a run: everything that changes the answers.

Two starts with equal identities may write to the same output. An identity is a flat dictionary of texts, so that two
of them can be compared, and their differences shown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.config import RunConfig
from sarathi_pp.errors import InputError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.model.dtypes import Dtypes
from sarathi_pp.text.tokenizer import tokenizer_digest

Identity = dict[str, str]

_ABSENT = "nothing"
_HASH = "blake2b"
_DIGITS = 32
_PIECE_BYTES = 2**20


def identity_of(
    config: RunConfig,
    facts: ModelFacts,
    dtypes: Dtypes,
    defaults: GenerationDefaults,
    model_dir: Path | None,
    input_path: str,
) -> Identity:
    """Return the identity of a start. It leaves out options that change no answer: stages, policy, sizes.

    Raises:
        InputError: the input cannot be read.
    """
    digest, num_bytes = input_digest(input_path)
    # An output of an earlier version can be resumed, so variables are absent if there are none.
    variables = config.default_chat_template_kwargs
    chat = {"default_chat_template_kwargs": json.dumps(variables, sort_keys=True)} if variables else {}
    return {
        "model": facts.fingerprint,
        "tokenizer": tokenizer_digest(model_dir) if model_dir is not None else _ABSENT,
        "dtype": dtypes.compute,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": str(facts.max_model_len(config.max_model_len)),
        "input": digest,
        "input_bytes": num_bytes,
        "input_name": Path(input_path).suffix.lower(),  # it may mark plain text
        "seed": str(config.seed),
        **{name: json.dumps(value) for name, value in defaults.settings().items()},
        **chat,
    }


def output_name(path: str, run_dir: Path) -> str:
    """Return a name that ties a run directory to its output: the output's path relative to the directory.

    The name stays right if both are moved together. For the default directory, OUTPUT.run, it is a fixed text, so that
    both may also be renamed. A move would change an absolute path. A copy or --retry-errors would change an inode.
    """
    if path == "-":
        return "a stream"
    output, folder = os.path.realpath(path), os.path.realpath(run_dir)
    return "the one it is named after" if folder == f"{output}.run" else os.path.relpath(output, folder)


def input_digest(path: str) -> tuple[str, str]:
    """Return the digest of a regular file and its size in bytes, or constants for any other input.

    Other inputs, such as pipes, can be read only once.

    Raises:
        InputError: the file cannot be read.
    """
    if path == "-" or not Path(path).is_file():
        return "a stream", _ABSENT
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, _HASH).hexdigest()[:_DIGITS], str(stream.tell())
    except OSError as error:
        raise InputError(f"--input {path} cannot be read: {error.strerror}") from error


def grown_input(before: Mapping[str, str], now: Identity, path: str) -> Identity:
    """Return `now`, but with the input of `before` if the input file has only grown by whole lines since then.

    So a resumed run accepts an input file to which lines were added.

    Args:
        before: identity of an earlier start.
        now: identity of this start.
        path: the input.

    Raises:
        InputError: the file cannot be read.
    """
    size = before.get("input_bytes", _ABSENT)
    if not size.isdecimal() or int(size) >= int(now["input_bytes"]):
        return now
    digest, last, left = hashlib.new(_HASH), b"\n", int(size)
    try:
        with open(path, "rb") as stream:
            while left and (data := stream.read(min(left, _PIECE_BYTES))):
                digest.update(data)
                last, left = data[-1:], left - len(data)
            added = stream.read(2)
    except OSError as error:
        raise InputError(f"--input {path} cannot be read: {error.strerror}") from error
    # If the earlier input had no newline at its end, the added bytes must start with one.
    line_ended = last == b"\n" or added[:1] == b"\n" or added == b"\r\n"
    if left or not line_ended or digest.hexdigest()[:_DIGITS] != before.get("input"):
        return now
    return {**now, "input": before["input"], "input_bytes": size}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return each difference between two identities, in words."""
    names = [*before, *(name for name in now if name not in before)]
    pairs = {name: (before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in names if name != "input_bytes"}
    return [_difference(name, was, is_now) for name, (was, is_now) in pairs.items() if was != is_now]


def _difference(name: str, was: str, is_now: str) -> str:
    return "the input file was changed" if name == "input" else f"{name} was {was} and is {is_now}"
