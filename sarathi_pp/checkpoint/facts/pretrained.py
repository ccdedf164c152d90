"""Transformers' config object from config.json, with errors that name the key that is not accepted.

transformers checks types strictly. Its model classes find other mistakes: activations, rope parameters, ids beyond the
vocabulary. Their errors do not name the file and often not the key. This module finds both. It leaves out one key after
the other and tries to make the model without weights. That costs no memory, and happens only after an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.families import Family
from sarathi_pp.checkpoint.facts.support import find_family
from sarathi_pp.checkpoint.quantised.scheme import QUANTISATION_KEYS
from sarathi_pp.errors import InputError, StoppedError

# Keys that are never left out: they decide which class is made, or have no effect.
_KEPT = ("architectures", "model_type", "transformers_version")


def load_config(directory: Path) -> tuple[Family, Any]:
    """Return the model's family and transformers' config object, made from config.json.

    Raises:
        InputError: transformers refuses a key. The message names the key and its value.
    """
    file = ConfigFile.read(directory)
    family = find_family(file)
    try:
        with quiet_transformers():
            config = _make(family, file.values)
    except Exception as error:  # whatever the library raises, the file is the cause
        raise refuse_config(directory, error) from error
    kinds = getattr(config, "layer_types", None) or ()
    if family.windows == "by_type" and "sliding_attention" in kinds and config.sliding_window is None:
        raise InputError(f"{file.path}: sliding_window is null, and layer_types has layers of sliding_attention")
    return family, config


def refuse_config(directory: Path, error: Exception) -> InputError:
    """Return the error for a config.json from which transformers could make no config object or no model.

    Args:
        error: the error that transformers raised.

    Raises:
        StoppedError: `error` itself, if it is one: a signal came meanwhile.
    """
    if isinstance(error, StoppedError):
        raise error
    file = ConfigFile.read(directory)
    family, reason = find_family(file), _last_line(error)
    keys = [key for key in file.values if key not in _KEPT]
    keys.sort(key=lambda key: key not in reason)  # most errors name it
    for key in keys:
        if _makes_model(family, {name: value for name, value in file.values.items() if name != key}):
            return InputError(f"{file.path}: {key} is {file.values[key]!r:.200}, which transformers refuses: {reason}")
    return InputError(f"{file.path}: transformers refuses it: {reason}")


def _make(family: Family, values: Mapping[str, object]) -> Any:
    # Quantised weights come as floats.
    plain = {key: _decoded(value) for key, value in values.items() if key not in QUANTISATION_KEYS}
    # transformers converts weights by the model type, and does not know the aliases.
    return CONFIG_MAPPING[family.model_type].from_dict({**plain, "model_type": family.model_type})


def _decoded(value: object) -> object:
    """Return a value of config.json with the numbers that JSON lacks: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, dict):
        if list(value) == ["__float__"] and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _decoded(one) for key, one in value.items()}
    return value


def _makes_model(family: Family, values: Mapping[str, object]) -> bool:
    try:
        with quiet_transformers(), torch.device("meta"):
            getattr(transformers, family.architecture)(_make(family, values))
    except StoppedError:
        raise
    except Exception:
        return False
    return True


def _last_line(error: Exception) -> str:
    """Return the last line of an error's text, which names the cause, without a full stop.

    If the text alone would not be understood, the class of the error comes first.
    """
    lines = str(error).strip().splitlines()
    text = lines[-1].strip().rstrip(".") if lines else ""
    return text if len(lines) > 1 or (text and isinstance(error, ValueError)) else f"{type(error).__name__}: {text}"


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """Silence transformers' progress bar and log.

    Yields:
        A list to which transformers' log texts are appended. Some errors, as when it merges experts, are only there.
    """
    said, theirs = _Said(), logging.getLogger("transformers")
    before = theirs.level, theirs.handlers, theirs.propagate
    bars = transformers_logging.is_progress_bar_enabled()
    theirs.setLevel(logging.WARNING)
    theirs.handlers, theirs.propagate = [said], False
    transformers_logging.disable_progress_bar()
    try:
        yield said.texts
    finally:
        level, theirs.handlers, theirs.propagate = before
        theirs.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
