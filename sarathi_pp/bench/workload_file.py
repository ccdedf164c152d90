"""Workloads out of files: what somebody's requests were, one JSON line each.

    {"num_prompt_tokens": 812, "num_output_tokens": 64, "arrival_s": 0.25}

The keys of `generate`'s own output, so its answers are a workload, and so are OpenAI lines, which count tokens as
`usage`; other keys are nobody's business. Lines with an error or without output asked nothing of the pipeline and are
left out. arrival_s: seconds, never less than the line before has; on all of the lines or on none.
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

# Beyond every pipeline, as in sim/workload.py.
_MOST_TOKENS = 10_000_000
# A hundred years.
_MOST_SECONDS = 3.2e9


class _Recorded(NamedTuple):
    prompt: int
    output: int
    arrival_s: float | None


def read_workload(text: str) -> Workload:
    """By name or from a file, which may also stand where a name takes another workload.

    A file is read once to be checked and again at each use, never held. Raises ConfigError, MissingError (it cannot be
    read) or InputError, which names the line.
    """
    return parse_workload(text, _recorded)


def _recorded(name: str) -> Workload | None:
    path = Path(name)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
    except (OSError, ValueError):  # no such file, or no name that a file can have
        return None
    count, longest, timed, latest = 0, 0, False, 0.0
    for line, one in _numbered(path):
        if count and timed != (one.arrival_s is not None):
            raise InputError(f"{path} line {line}: arrival_s must be on all of the lines or on none")
        if one.arrival_s is not None and one.arrival_s < latest:
            raise InputError(
                f"{path} line {line}: arrival_s is {one.arrival_s:g}, before the {latest:g} of a line above"
            )
        count, longest, timed = count + 1, max(longest, one.prompt + one.output), one.arrival_s is not None
        latest = one.arrival_s or 0.0
    if not count:
        raise ConfigError(f"the workload {path} holds no request that was answered")

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
    """Return what a line records; None if its request was not run.

    Args:
        where: names the line, for errors.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON; each line is an object like those that generate writes") from None
    if not isinstance(record, dict):
        raise InputError(f"{where} is no object; each line is one like those that generate writes")
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
