"""The same work done by several entrants in turn, some rounds of it: policies of ours, and other engines.

    work -> entrant's command -> its processes (watched: memory, what the host took meanwhile) -> one Run

Every run is a fresh process on a machine that was waited for until it was quiet, and its time is that of the work
alone, loading excluded. Entrants alternate, so that whatever a shared host does over minutes happens to all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench.footprint import Footprint
from sarathi_pp.bench.machine import stolen, wait_until_quiet
from sarathi_pp.bench.peers import PeerChoice
from sarathi_pp.core.request import Request
from sarathi_pp.distributed.environment import inherited
from sarathi_pp.errors import SarathiError
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.latency import Spread

# Characters of what a failed command said, and seconds that one has to end itself.
_TAIL = 2000
_GRACE_S = 10.0
TokenIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """What all entrants are given. requests: all there at time 0. max_num_seqs: over the whole pipeline."""

    model: Path
    dtype: str
    requests: Sequence[Request]
    max_num_seqs: int
    directory: Path

    @property
    def prompts(self) -> Path:
        return self.directory / "prompts.jsonl"

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Prompt and output tokens of each request."""
        for request in self.requests:
            yield len(request.prompt_token_ids), request.sampling.max_new_tokens


def write_prompts(path: Path, requests: Iterable[Request]) -> None:
    """As lines that `generate` reads; of what a request asks for, its length alone."""
    with path.open("w") as file:
        for request in requests:
            row = {
                "id": request.index,
                "prompt_token_ids": list(request.prompt_token_ids),
                "max_new_tokens": request.sampling.max_new_tokens,
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


class Entrant(Protocol):
    """One way to do the work. label: its own among all entrants."""

    @property
    def label(self) -> str: ...
    def command(self, work: Work) -> list[str]: ...
    def environment(self, work: Work) -> dict[str, str]: ...

    def outcome(self, work: Work, printed: str) -> tuple[Report, TokenIds]:
        """From what the command printed: figures under the names of a report, and the output tokens of each request."""
        ...


@dataclass(frozen=True, slots=True)
class OurRun:
    """`generate` with some options. arguments: all but those that say what is read and written."""

    label: str
    arguments: tuple[str, ...]

    def command(self, work: Work) -> list[str]:
        given = ["--model", str(work.model), "--dtype", work.dtype, "--max-num-seqs", str(work.max_num_seqs)]
        given += ["--input", str(work.prompts), "--output", str(self._answers(work)), "--overwrite"]
        return [sys.executable, "-P", "-m", "sarathi_pp", "generate", *given, *self.arguments, "--quiet", "--json"]

    def environment(self, work: Work) -> dict[str, str]:
        return {}

    def outcome(self, work: Work, printed: str) -> tuple[Report, TokenIds]:
        with self._answers(work).open() as file:
            answers = {row["id"]: row["token_ids"] for row in map(json.loads, file)}
        return json.loads(printed.splitlines()[-1]), [answers[request.index] for request in work.requests]

    def _answers(self, work: Work) -> Path:
        return work.directory / "answers.jsonl"


@dataclass(frozen=True, slots=True)
class PeerRun:
    choice: PeerChoice
    peers_dir: Path

    @property
    def label(self) -> str:
        return self.choice.label

    def command(self, work: Work) -> list[str]:
        asked = {
            "model": str(work.model.resolve()),
            "dtype": work.dtype,
            "max_num_seqs": work.max_num_seqs,
            "parameters": dict(self.choice.parameters),
            "requests": [
                {"prompt_token_ids": list(one.prompt_token_ids), "output_tokens": one.sampling.max_new_tokens}
                for one in work.requests
            ],
        }
        path = work.directory / "asked.json"
        path.write_text(json.dumps(asked))
        return self.choice.command(self.choice.python(self.peers_dir), path)

    def environment(self, work: Work) -> dict[str, str]:
        return self.choice.peer.environment(self.choice.python(self.peers_dir), self.choice.parameters)

    def outcome(self, work: Work, printed: str) -> tuple[Report, TokenIds]:
        # Engines print what they like before it.
        answered = next(filter(None, map(_answer_of, reversed(printed.splitlines()))), None)
        if answered is None:
            raise SarathiError(f"{self.label} ended without an answer:\n{printed[-_TAIL:]}")
        tokens: TokenIds = answered["token_ids"]
        prompt_tokens, output_tokens = sum(prompt for prompt, _ in work.lengths()), sum(map(len, tokens))
        return {
            "wall_s": answered["wall_s"],
            "requests": len(tokens),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "total_tokens_per_s": (prompt_tokens + output_tokens) / answered["wall_s"],
            "output_tokens_per_s": output_tokens / answered["wall_s"],
            "ttft_s": asdict(Spread.of(answered["ttft_s"] or [])),
            "version": answered["version"],
        }, tokens


def _answer_of(line: str) -> dict[str, Any] | None:
    """What a peer's program prints, or None for anything else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"wall_s", "token_ids", "ttft_s", "version"} <= found.keys() else None


@dataclass(frozen=True, slots=True)
class Run:
    """One entrant's work in one round.

    busy_before: share of the cores that others took when it began. stolen: of their time, by the host, meanwhile.
    peak_bytes: of all its processes, loading included. command_s: from its start to its end, loading included.
    """

    entrant: str
    round: int
    report: Report
    token_ids: TokenIds
    busy_before: float
    stolen: float
    peak_bytes: int
    command_s: float

    def to_json(self, first: TokenIds) -> Report:
        """first: the first run's outputs, to say for which share of the requests these are the same."""
        same = sum(ours == theirs for ours, theirs in zip(self.token_ids, first, strict=True)) / len(first)
        facts = {name: getattr(self, name) for name in ("entrant", "round", "busy_before", "stolen", "command_s")}
        return {**facts, "peak_memory_bytes": self.peak_bytes, "same_tokens": same, **self.report}


def hold(work: Work, entrants: Sequence[Entrant], rounds: int) -> Iterator[Run]:
    """Run all rounds and yield each run when it is over.

    Every second round goes backwards. Drift of the machine, and what one entrant leaves for the next, then do not
    always hit the same entrant.

    Raises SarathiError where an entrant failed, with the end of what it said, or where its outputs are of other lengths
    than they were asked to be: it did not do the work.
    """
    write_prompts(work.prompts, work.requests)
    for number in range(rounds):
        for entrant in entrants[:: -1 if number % 2 else 1]:
            yield _run(work, entrant, number)


def _run(work: Work, entrant: Entrant, number: int) -> Run:
    command, environment = entrant.command(work), inherited(entrant.environment(work))
    printed, said = work.directory / "printed", work.directory / "said"
    busy, footprint, clock = wait_until_quiet(), Footprint(), SystemClock()
    begin = clock.now()
    with printed.open("wb") as out, said.open("wb") as error, stolen() as lost:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=error, start_new_session=True)
        try:
            with footprint.watching(process.pid):
                code = process.wait()
        finally:
            _end(process)
    command_s = clock.now() - begin
    if code:
        raise SarathiError(f"{entrant.label} ended with code {code}:\n{said.read_text(errors='replace')[-_TAIL:]}")
    report, token_ids = entrant.outcome(work, printed.read_text(errors="replace"))
    _check_lengths(entrant.label, work, token_ids)
    return Run(entrant.label, number, report, token_ids, busy, lost.share, footprint.peak_bytes, command_s)


def _check_lengths(label: str, work: Work, token_ids: TokenIds) -> None:
    if len(token_ids) != len(work.requests):
        raise SarathiError(f"{label} answered {len(token_ids)} requests; it was given {len(work.requests)}")
    wrong = [
        (index, wanted, len(found))
        for index, ((_, wanted), found) in enumerate(zip(work.lengths(), token_ids, strict=True))
        if len(found) != wanted
    ]
    if wrong:
        index, wanted, found = wrong[0]
        raise SarathiError(
            f"{label} answered {len(wrong)} of {len(token_ids)} requests with another number of tokens than it was "
            f"asked for; request {index}: {found} instead of {wanted}"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and all that it has started: also what a killed one has left behind, which is in its session."""
    family: list[psutil.Process] = []
    if process.poll() is None:  # somebody interrupts
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:  # our own workers are sessions of their own
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
