"""Read workloads from files: the lengths of recorded requests, one JSON line each.

    {"num_prompt_tokens": 812, "num_output_tokens": 64, "arrival_s": 0.25}

The output lines of `generate` have the first two keys, so an output file is a workload. Output lines in OpenAI's form
work too: they have the numbers of tokens in `usage`. Other keys are ignored. Lines with an error or without output are
left out, because the pipeline did nothing for them. `arrival_s` is in seconds and never decreases. All lines have it,
or no line.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sarathi_pp.errors import ConfigError, InputError, MissingError
from sarathi_pp.inputs.lines import read_lines
from sarathi_pp.sim.workload import Workload, parse_workload

# Most prompt or output tokens of a request. The same limit as in sim/workload.py. No pipeline runs a longer request.
_MOST_TOKENS = 10_000_000
# A hundred years.
_MOST_SECONDS = 3.2e9


class _Recorded(NamedTuple):
    prompt: int
    output: int
    arrival_s: float | None


def read_workload(text: str) -> Workload:
    """Return the workload that a text describes: a name with parameters, or the path of a file.

    A path may also be given inside a workload that takes another one, such as "poisson:rate=2,FILE". The file is read
    once to check it, and again at each use. It is never kept in memory.

    Raises:
        ConfigError: the name is unknown or has wrong parameters, or the file holds no answered request.
        MissingError: the file cannot be read.
        InputError: a line is wrong. The message names the line.
    """
    return parse_workload(text, _recorded)


def _recorded(name: str) -> Workload | None:
    path = Path(name)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
    except (OSError, ValueError):  # the file does not exist, or the name is not possible for a file
        return None
    count, longest, timed, latest = 0, 0, False, 0.0
    for line, one in _numbered(path):
        if count and timed != (one.arrival_s is not None):
            raise InputError(f"{path} line {line}: arrival_s must be on all lines or on none")
        if one.arrival_s is not None and one.arrival_s < latest:
            raise InputError(
                f"{path} line {line}: arrival_s is {one.arrival_s:g}, less than {latest:g} in an earlier line"
            )
        count, longest, timed = count + 1, max(longest, one.prompt + one.output), one.arrival_s is not None
        latest = one.arrival_s or 0.0
    if not count:
        raise ConfigError(f"the workload {path} holds no answered request")

    def lengths() -> Iterator[tuple[int, int]]:
        return ((one.prompt, one.output) for _, one in _numbered(path))

    def arrivals() -> Iterator[float]:
        return (one.arrival_s or 0.0 for _, one in _numbered(path))

    return Workload.recorded(name, count, longest, lengths, arrivals if timed else None)


def _numbered(path: Path) -> Iterator[tuple[int, _Recorded]]:
    try:
        with path.open("rb") as file:
            for number, data in read_lines(file):
                one = _of_line(f"{path} line {number}", data)
                if one is not None:
                    yield number, one
    except OSError as error:
        raise MissingError(f"cannot read the workload {path}: {error.strerror}") from error


def _of_line(where: str, data: bytes) -> _Recorded | None:
    """Return the recorded request of a line; None if the line has an error or no output.

    Args:
        where: file and line number, for errors.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON; each line must be an object, as generate writes it") from None
    if not isinstance(record, dict):
        raise InputError(f"{where} is not an object; each line must be one, as generate writes it")
    response = record.get("response")
    refused = isinstance(response, dict) and response.get("status_code", 200) != 200
    if record.get("error") is not None or refused:
        return None
    output = _count(where, record, "num_output_tokens", "completion_tokens", least=0)
    if output == 0:
        return None
    prompt = _count(where, record, "num_prompt_tokens", "prompt_tokens", least=1)
    return _Recorded(prompt, output, _seconds(where, record.get("arrival_s")))


def _count(where: str, record: dict[str, object], key: str, usage_key: str, *, least: int) -> int:
    value = record.get(key)
    response = record.get("response")
    if isinstance(response, dict) and isinstance(body := response.get("body"), dict):
        usage = body.get("usage")
        key, value = usage_key, usage.get(usage_key) if isinstance(usage, dict) else None
    if type(value) is not int or not least <= value <= _MOST_TOKENS:
        raise InputError(f"{where}: {key} is {value!r:.60}; it must be a whole number from {least} to {_MOST_TOKENS}")
    return value


def _seconds(where: str, value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:  # type: ignore[operator]
        raise InputError(f"{where}: arrival_s is {value!r:.60}; it must be seconds from 0 to {_MOST_SECONDS:g}")
    return float(value)  # type: ignore[arg-type]
