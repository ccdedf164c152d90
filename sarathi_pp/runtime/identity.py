"""What must be the same of two starts for their answers to belong into one file: flat, to be compared and shown."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from sarathi_pp.config import RunConfig
from sarathi_pp.errors import InputError
from sarathi_pp.model.support import ModelFacts
from sarathi_pp.runtime.generation_config import GenerationDefaults
from sarathi_pp.runtime.text import tokenizer_digest

Identity = dict[str, str]

_ABSENT = "nothing"


def identity_of(
    config: RunConfig, facts: ModelFacts, defaults: GenerationDefaults, model_dir: Path | None, input_path: str
) -> Identity:
    """Of a start. Not what changes no answer: stages, policy, sizes.

    Raises InputError for an input that cannot be read.
    """
    return {
        "model": facts.fingerprint,
        "tokenizer": tokenizer_digest(model_dir) if model_dir is not None else _ABSENT,
        "dtype": facts.dtype if config.dtype == "auto" else config.dtype,
        "max_model_len": str(facts.max_model_len(config.max_model_len)),
        "input": input_digest(input_path),
        "input_name": Path(input_path).suffix.lower(),  # which may say that it is plain text
        "seed": str(config.seed),
        "eos_token_ids": json.dumps(sorted(defaults.eos_token_ids)),
        **{name: json.dumps(value) for name, value in asdict(defaults.params({})).items() if name != "seed"},
    }


def output_name(path: str, run_dir: Path) -> str:
    """What ties a run directory to its output, also where both are moved: its place as seen from there.

    The directory that is named after its output, the default, goes by that, so that both may get another name. Neither
    an absolute path, which a move changes, nor an inode, which a copy and --retry-errors change, would do.
    """
    if path == "-":
        return "a stream"
    output, folder = os.path.realpath(path), os.path.realpath(run_dir)
    return "the one it is named after" if folder == f"{output}.run" else os.path.relpath(output, folder)


def input_digest(path: str) -> str:
    """Of a regular file's bytes; anything else can be read only once. Raises InputError."""
    if path == "-" or not Path(path).is_file():
        return "a stream"
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    except OSError as error:
        raise InputError(f"--input {path} cannot be read: {error.strerror}") from error


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each thing that is not the same, in words."""
    names = [*before, *(name for name in now if name not in before)]
    pairs = {name: (before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in names}
    return [f"{name} was {was} and is {is_now}" for name, (was, is_now) in pairs.items() if was != is_now]
