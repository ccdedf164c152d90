"""The identity of a start. Two starts with equal ones may write to one file. It is flat, to be compared and shown."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from sarathi_pp.config import RunConfig
from sarathi_pp.errors import InputError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.model.checkpoint.support import ModelFacts
from sarathi_pp.text.tokenizer import tokenizer_digest

Identity = dict[str, str]

_ABSENT = "nothing"
_HASH = "blake2b"
_DIGITS = 32
_PIECE_BYTES = 2**20


def identity_of(
    config: RunConfig, facts: ModelFacts, defaults: GenerationDefaults, model_dir: Path | None, input_path: str
) -> Identity:
    """Return the identity of a start. It leaves out options that change no answer: stages, policy, sizes.

    Raises:
        InputError: the input cannot be read.
    """
    digest, num_bytes = input_digest(input_path)
    return {
        "model": facts.fingerprint,
        "tokenizer": tokenizer_digest(model_dir) if model_dir is not None else _ABSENT,
        "dtype": facts.dtype if config.dtype == "auto" else config.dtype,
        "max_model_len": str(facts.max_model_len(config.max_model_len)),
        "input": digest,
        "input_bytes": num_bytes,
        "input_name": Path(input_path).suffix.lower(),  # it may mark plain text
        "seed": str(config.seed),
        **{name: json.dumps(value) for name, value in defaults.settings().items()},
    }


def output_name(path: str, run_dir: Path) -> str:
    """Return a name that ties a run directory to its output, even if both are moved: the output's relative path.

    A directory that is named after its output, the default, has a fixed name here, so that both may be renamed. An
    absolute path would not do, because a move changes it. A copy and --retry-errors change an inode.
    """
    if path == "-":
        return "a stream"
    output, folder = os.path.realpath(path), os.path.realpath(run_dir)
    return "the one it is named after" if folder == f"{output}.run" else os.path.relpath(output, folder)


def input_digest(path: str) -> tuple[str, str]:
    """Return the digest of a regular file and its size in bytes, or constants for other inputs.

    The other inputs can be read only once.

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
    """Return `now`, with the input of `before` if the file starts with that input, and only whole lines follow.

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
    # A last line without its end must not have become longer.
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
