"""What a policy can be told on the command line: a field of it, whose type and range decide which values are legal."""

from __future__ import annotations

import dataclasses
from typing import Any

_REALS = ("float", float)
_NUMBERS = ("int", int, *_REALS)


def parameter(default: float, least: float, most: float | None = None) -> Any:
    """A policy's field with a range, both ends legal."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


def parameters_of(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that can be set on the command line: the numbers among those of a dataclass."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field for field in fields if field.init and field.type in _NUMBERS}


def read_parameter(field: dataclasses.Field[Any], text: str) -> float:
    """The field's value as an int or a float, by its type. Raises ValueError saying what it must be."""
    real = field.type in _REALS
    least, most = field.metadata.get("least"), field.metadata.get("most")
    words = "a number" if real else "an integer"
    if most is not None:
        words += f" from {least} to {most}"
    elif least is not None:
        words += f" of at least {least}"
    try:
        value = float(text) if real else int(text)
    except ValueError:
        raise ValueError(words) from None
    # Comparisons that NaN fails.
    if not (least is None or value >= least) or not (most is None or value <= most):
        raise ValueError(words)
    return value
