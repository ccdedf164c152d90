"""A contest: several entrants do the same work in turn, for some rounds.

Entrants are sarathi-pp with different options, and other engines.

    work -> entrant's command -> its processes (measured: memory, and CPU time that the host took) -> one Run

Every run is a new process, and starts when the machine is quiet. Its time is that of the work alone, without loading.
Entrants take turns, so that a change of a shared host over minutes affects all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench.family import family
from sarathi_pp.bench.footprint import Footprint
from sarathi_pp.bench.machine import stolen, wait_until_quiet
from sarathi_pp.bench.peers import PeerChoice
from sarathi_pp.core.request import Request
from sarathi_pp.distributed.environment import inherited
from sarathi_pp.errors import SarathiError
from sarathi_pp.process.activity import Activity
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.latency import Spread

# An error shows this many characters from the end of a failed command's messages.
_TAIL = 2000
# Seconds that a command has to end after SIGTERM.
_GRACE_S = 10.0
TokenIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """The work that every entrant gets.

    Attributes:
        dtype: float type in which other engines hold the weights and compute, by torch's name.
        requests: all requests. They arrive at time 0.
        max_num_seqs: most running sequences of the whole pipeline.
        directory: folder for the contest's scratch files.
    """

    model: Path
    dtype: str
    requests: Sequence[Request]
    max_num_seqs: int
    directory: Path

    @property
    def prompts(self) -> Path:
        return self.directory / "prompts.jsonl"

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield prompt and output length of the requests, in tokens."""
        for request in self.requests:
            yield len(request.prompt_token_ids), request.sampling.max_new_tokens


def write_prompts(path: Path, requests: Iterable[Request]) -> None:
    """Write requests as input lines of `generate`. Of the sampling parameters, only the output length is written."""
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
    """A program that can do the work: sarathi-pp with some options, or another engine.

    Attributes:
        label: its name in the results, unique among all entrants.
    """

    @property
    def label(self) -> str: ...
    def command(self, work: Work) -> list[str]: ...
    def environment(self, work: Work) -> dict[str, str]: ...

    def outcome(self, work: Work, printed: str) -> tuple[Report, TokenIds]:
        """Return the figures of a run, with the keys of report.json, and the ids of the output tokens per request.

        Args:
            printed: standard output of the command.
        """
        ...


@dataclass(frozen=True, slots=True)
class OurRun:
    """A run of `generate` with some options.

    Attributes:
        arguments: options of `generate`, except those for the model, its inputs and outputs.
    """

    label: str
    arguments: tuple[str, ...]

    def command(self, work: Work) -> list[str]:
        given = ["--model", str(work.model), "--max-num-seqs", str(work.max_num_seqs)]
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
    """A run of another engine.

    Attributes:
        peers_dir: directory with the environments of other engines.
    """

    choice: PeerChoice
    peers_dir: Path

    @property
    def label(self) -> str:
        return self.choice.label

    def command(self, work: Work) -> list[str]:
        asked = {
            "model": str(work.model.resolve()),
            "dtype": self.choice.dtype(work.dtype),
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
        # The result is the last line that has the form of one. Engines may print other lines too.
        answered = next(filter(None, map(_answer_of, reversed(printed.splitlines()))), None)
        if answered is None:
            raise SarathiError(f"{self.label} ended without printing its result. It printed:\n{printed[-_TAIL:]}")
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
    """Parse the JSON line in which another engine's program prints its result. Return None for any other line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"wall_s", "token_ids", "ttft_s", "version"} <= found.keys() else None


@dataclass(frozen=True, slots=True)
class Run:
    """One entrant's run in one round.

    Attributes:
        round: index of the round, from 0.
        token_ids: output tokens per request.
        busy_before: share of the cores (0 to 1) that other processes took just before the run.
        stolen: share of the cores' time (0 to 1) that the host gave to other machines during the run.
        peak_bytes: most memory of all its processes together, loading included.
        command_s: seconds from the start of the command to its end, loading included.
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
        """Return the run as JSON.

        Args:
            first: output tokens of the contest's first run. The key `same_tokens` is the share of requests for which
                this run has the same tokens.
        """
        same = sum(ours == theirs for ours, theirs in zip(self.token_ids, first, strict=True)) / len(first)
        facts = {name: getattr(self, name) for name in ("entrant", "round", "busy_before", "stolen", "command_s")}
        return {**facts, "peak_memory_bytes": self.peak_bytes, "same_tokens": same, **self.report}


def hold(work: Work, entrants: Sequence[Entrant], rounds: int, activity: Activity | None = None) -> Iterator[Run]:
    """Run all rounds and yield each run when it is over.

    Every second round takes the entrants in reverse order. Otherwise, a machine that slows down during each round would
    always hit the last entrants. Each entrant would also always find the machine as the same other entrant left it.

    Args:
        activity: shows the current run to the user.

    Raises:
        SarathiError: an entrant failed, or its outputs do not have the requested lengths, so that it did not do the
            work. The message has the end of the entrant's own messages.
    """
    write_prompts(work.prompts, work.requests)
    total, activity = rounds * len(entrants), activity or Activity()
    for number in range(rounds):
        for place, entrant in enumerate(entrants[:: -1 if number % 2 else 1]):
            which = f"{entrant.label}, run {number * len(entrants) + place + 1} of {total}"
            with activity.phase(f"waiting until the machine is quiet for {which}"):
                busy = wait_until_quiet()
            with activity.phase(f"running {which}"):
                run = _run(work, entrant, number, busy)
            yield run


def _run(work: Work, entrant: Entrant, number: int, busy: float) -> Run:
    command, environment = entrant.command(work), inherited(entrant.environment(work))
    printed, said = work.directory / "printed", work.directory / "said"
    footprint, clock = Footprint(), SystemClock()
    begin = clock.now()
    with (
        printed.open("wb") as out,
        said.open("wb") as error,
        stolen() as lost,
        family(command, environment, out, error, _GRACE_S) as process,
        footprint.watching(process.pid),
    ):
        code = process.wait()
    command_s = clock.now() - begin
    if code:
        raise SarathiError(f"{entrant.label} ended with code {code}:\n{said.read_text(errors='replace')[-_TAIL:]}")
    report, token_ids = entrant.outcome(work, printed.read_text(errors="replace"))
    _check_lengths(entrant.label, work, token_ids)
    return Run(entrant.label, number, report, token_ids, busy, lost.share, footprint.peak_bytes, command_s)


def _check_lengths(label: str, work: Work, token_ids: TokenIds) -> None:
    if len(token_ids) != len(work.requests):
        raise SarathiError(f"{label} answered {len(token_ids)} of {len(work.requests)} requests")
    wrong = [
        (index, wanted, len(found))
        for index, ((_, wanted), found) in enumerate(zip(work.lengths(), token_ids, strict=True))
        if len(found) != wanted
    ]
    if wrong:
        index, wanted, found = wrong[0]
        raise SarathiError(
            f"{label} answered {len(wrong)} of {len(token_ids)} requests with a wrong number of tokens. For example, "
            f"request {index} (counted from 0) has {found} output tokens instead of {wanted}"
        )
