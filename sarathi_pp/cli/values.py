"""Types of option values with a special notation: 4GiB, 1k, 8,8,9,7, auto."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import click

from sarathi_pp.config import DTYPES, KV_CACHE_DTYPE_ALIASES, KV_CACHE_DTYPES, size_in_bytes

# A smaller number without a unit is probably not meant in bytes.
_FEWEST_WITHOUT_UNIT = 1 << 20


class OutputFile(click.Path):
    """A file that is written repeatedly. `-` is refused, because it would become a file of that name.

    Args:
        stdout: advice how to print the same document on standard output, for the message.
    """

    def __init__(self, stdout: str) -> None:
        super().__init__(path_type=Path)
        self._stdout = stdout

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(f"'-' is not a file; {self._stdout}", param, ctx)
        return super().convert(value, param, ctx)


class JsonObject(click.ParamType[dict[str, object]]):
    """A JSON object, such as {"repetition_penalty": 1}."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is not a JSON object; write it like '{{\"repetition_penalty\": 1}}'", param, ctx)
        return found


class Bytes(click.ParamType[int]):
    """A size in bytes: 4GiB, 500MB or 1073741824."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size = size_in_bytes(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size; write it like 4GiB, 500MB or 1073741824", param, ctx)
        if str(value).strip().isdigit() and size < _FEWEST_WITHOUT_UNIT:
            self.fail(f"{value!r} is a number of bytes; give a unit, like {size}GiB or {size}MiB", param, ctx)
        return size


class Listed(click.ParamType[tuple[Any, ...]]):
    """One or several values, separated by commas: 80GiB,24GiB,24GiB."""

    def __init__(self, one: click.ParamType[Any], metavar: str) -> None:
        self._one = one
        self.name = metavar

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._one.convert(part.strip(), param, ctx) for part in str(value).split(","))


class KvCacheDtype(click.Choice[str]):
    """The float type of keys and values: auto or fp8. Names that other engines use are accepted, and not listed."""

    def __init__(self) -> None:
        super().__init__(KV_CACHE_DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in DTYPES[1:]:
            self.fail(f"{value!r} must be auto or fp8; auto follows --dtype {value}", param, ctx)
        return super().convert(KV_CACHE_DTYPE_ALIASES.get(value, value), param, ctx)


class Real(click.FloatRange):
    """A number in a range. It refuses nan, which passes click's check because every comparison with it is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Count(click.ParamType[int]):
    """A whole number of at least 1: 256, 1k (1000) or 1K (1024). With `auto` also the word auto (None)."""

    name = "integer"

    def __init__(self, *, auto: bool = False) -> None:
        self._auto = auto

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:  # type: ignore[override]
        text = str(value).strip()
        if self._auto and text == "auto":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kK]?)", text)
        if match is None or float(match[1]) * 1000 % 1:
            choices = "a whole number like 256 or 1k" + (", or auto" if self._auto else "")
            self.fail(f"{value!r} is not {choices}", param, ctx)
        number = float(match[1]) * {"": 1, "k": 1000, "K": 1024}[match[2]]
        if number != int(number) or number < 1:
            self.fail(f"{value!r} must be a whole number of at least 1", param, ctx)
        return int(number)


class LayerSplit(click.ParamType[tuple[int, ...]]):
    """A layer split: auto (None), even, or one number of layers per stage, such as 8,8,9,7."""

    name = "auto|even|N,N,..."

    def convert(  # type: ignore[override]
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | Literal["even"] | None:
        text = str(value).strip()
        if text == "auto":
            return None
        if text == "even":
            return "even"
        if not re.fullmatch(r"\d+(,\d+)*", text):
            self.fail(f"{value!r} is not auto, even, or one number of layers per stage like 8,8,9,7", param, ctx)
        return tuple(map(int, text.split(",")))
