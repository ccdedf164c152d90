"""Parameters of a policy, such as `even` in --policy sarathi:even=1.

They are fields of the policy's dataclass. The type and the range of a field limit the values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_REALS = ("float", float)
_NUMBERS = ("int", int, *_REALS)


def parameter(default: float, least: float, most: float | None = None) -> Any:
    """Return a dataclass field for a parameter with a range. `least` and `most` are legal; None: no upper limit."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


def parameters_of(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that the command line can set: those of a dataclass that are numbers."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field for field in fields if field.init and field.type in _NUMBERS}


def read_parameter(field: dataclasses.Field[Any], text: str) -> float:
    """Return the parameter's value from its text, as an int or a float by the field's type.

    Raises:
        ValueError: the value is not legal. The message names the legal values, as in "an integer from 0 to 1".
    """
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
    # These comparisons also reject NaN.
    if not (least is None or value >= least) or not (most is None or value <= most):
        raise ValueError(words)
    return value
