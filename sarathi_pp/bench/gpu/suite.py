"""The suite of `sarathi-pp bench gpu`, which checks and measures on one GPU all that sarathi_pp runs on GPUs.

    this process     chooses parts -> starts a worker ->   watches it   -> takes the results -> next worker
    worker                            machine, rates      <= limit_s each
    worker                            exact                                                     ...

Each part adds its figures to the document as it gets them. A check compares a measured value with the value that a GPU
must reach. A part that fails, hangs or breaks its device costs its own time only: the process is killed, and the next
parts run in a new one. This process never touches the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sarathi_pp.bench.family import family
from sarathi_pp.bench.gpu.document import Figures, GpuDocument
from sarathi_pp.bench.gpu.parts import START_S, Part, choose, share_process
from sarathi_pp.distributed.environment import inherited
from sarathi_pp.errors import ConfigError
from sarathi_pp.trace.clock import Clock

_WORKER = ("-P", "-m", "sarathi_pp.bench.gpu.worker")
# Seconds between two looks at a worker's files.
_POLL_S = 0.05
# An error shows this many characters from the end of a worker's messages.
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Step:
    """The start or the end of a part of the suite.

    Attributes:
        part: name of the part.
        ended: False if the part starts now.
    """

    part: str
    ended: bool


@dataclass(frozen=True, slots=True)
class _Result:
    """The figures and checks of a part.

    Attributes:
        goes_on: the worker runs its next part.
    """

    figures: Figures
    checks: list[Figures]
    goes_on: bool


def bench_gpu(
    document: GpuDocument,
    clock: Clock,
    budget_s: float,
    named: Sequence[str] = (),
    device: str = "cuda:0",
    sizes: Figures | None = None,
) -> Generator[Step, None, None]:
    """Run parts of the suite, and add their figures to the document. Yield a step before and after each part.

    Args:
        document: figures of earlier runs. They are kept unless their part runs again.
        budget_s: seconds after which everything that still runs is killed.
        named: names of the parts to run; empty for all parts that the document does not have completely.
        sizes: sizes of the measurements, from Sizes.to_json; None takes those for a GPU with a large model.

    Raises:
        ConfigError: torch finds no CUDA device, or the document is of another machine.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, and torch finds no CUDA device here")
    end_s = clock.now() + budget_s
    over = f"the {budget_s:g} s were over"
    waiting = choose(named, document.complete)
    while waiting:
        if clock.now() >= end_s:
            document.leave_out(waiting[0].name, over)
            yield Step(waiting.pop(0).name, True)
            continue
        together = share_process(waiting)
        request = {"device": device, "sizes": sizes, "parts": document.parts, "end_s": end_s}
        request["limits"] = {part.name: part.limit_s for part in together}
        with _worker(request, clock) as worker:
            for part in together:
                yield Step(part.name, False)
                result = worker.wait_for(part, end_s, over)
                waiting.remove(part)
                document.put(part.name, result.figures, result.checks)
                yield Step(part.name, True)
                if not result.goes_on:
                    break


@contextmanager
def _worker(request: Figures, clock: Clock) -> Iterator[_Worker]:
    """Start a worker. At the end of the block, kill it and all processes that it started, and remove their files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        path = folder / "request.json"
        path.write_text(json.dumps(request))
        # The profiler of torch would write hundreds of lines.
        environment = inherited({"KINETO_LOG_LEVEL": "5", "TMPDIR": scratch})
        command = [sys.executable, *_WORKER, str(path)]
        with (folder / "log").open("wb") as log, family(command, environment, log, log) as process:
            yield _Worker(process, folder, clock)


class _Worker:
    """A process that runs parts, seen from the process that watches it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, clock: Clock) -> None:
        self._process = process
        self._folder = folder
        self._clock = clock

    def wait_for(self, part: Part, end_s: float, over: str) -> _Result:
        """Wait for the end of a part, of its process, or of the time for it.

        Args:
            end_s: time after which no part may run.
            over: why nothing may run after that time.
        """
        begin_s, limit_s, began = self._clock.now(), START_S, False
        while True:
            code = self._process.poll()  # first, because the process may write the file and end
            found = self._read(part)
            if found is not None and found["ended"]:
                return _Result(found["figures"], found["checks"], "error" not in found["figures"])
            now_s = self._clock.now()
            if found is not None and not began:
                begin_s, limit_s, began = now_s, part.limit_s, True
            if now_s >= end_s:
                return self._cut_off(part, found, {"left_out": over, "took_s": now_s - begin_s})
            if code is not None or now_s - begin_s > limit_s:
                why = f"its process ended with code {code}" if code is not None else f"killed after {limit_s:g} s"
                error = f"{why}: {self._said()}" if self._said() else why
                return self._cut_off(part, found, {"error": error, "took_s": now_s - begin_s})
            self._clock.sleep(_POLL_S)

    def _read(self, part: Part) -> Figures | None:
        path = self._folder / f"{part.name}.json"
        found: Figures | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def _cut_off(self, part: Part, found: Figures | None, why: Figures) -> _Result:
        """Return what a part has measured before its end. If the end is an error, it is a check too."""
        figures, checks = (found["figures"], found["checks"]) if found is not None else ({}, [])
        if "error" in why:
            checks = [
                *checks,
                {"part": part.name, "what": f"{part.name} runs", "seen": False, "wanted": True, "met": False},
            ]
        return _Result({**figures, **why}, checks, goes_on=False)

    def _said(self) -> str:
        """Return the end of the worker's messages."""
        return (self._folder / "log").read_text(errors="replace")[-_TAIL:].strip()
