"""Measure the cost of many ranks: how soon they start, and the share of a core that the coordinator takes.

    python examples/benchmarks/measure_ranks.py --output docs/benchmarks/results/ranks.json

start        `sarathi-pp generate --emulate` with 2, 4, 8 and 16 processes, the last as 2 replicas of 8 stages. The
             times are from the command until the first microbatch is issued, until every replica has issued one, and
             to the end of the command. An uncounted run comes first. All processes share the cores of this machine.
coordinator  One process with a coordinator and the edges of 8 to 64 stages. There are 64 running sequences per stage,
             the default. The edges are in-process channels, so every frame passes the codec at every stage. The
             figures are CPU times of the first rank's work per microbatch, without its stage's computation: the step
             (pick, pages, plan, encode the frame) and the result (decode it and update the sequences).

The speed of the machine changes, so the numbers of ranks take turns of some dozens of microbatches. Each figure is the
median of the means of its turns. A line is fitted through the figures by number of ranks, and the document has its
largest error. It also has the share of a core that the coordinator takes. That share is for stages as fast as those of
SARATHI's GPT-3 on 64 A100s. Garbage collection covers only objects that were made during the timing.

The document has the load average of both parts, because start-up times on a busy machine mean little.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import numpy as np
from measure_coordinator import requests
from record import Record, spread

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.bench.machine import stolen
from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.cost.model import CostModel, Load
from sarathi_pp.core.plan import MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy import PolicySpec, parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.report.run_reader import find_traces
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.events import Issued
from sarathi_pp.trace.recorder import read_trace
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import MicroBatchFrame, decode, encode

# (replicas, stages per replica)
SHAPES = ((1, 2), (1, 4), (1, 8), (2, 8))
RANKS = (8, 16, 32, 64)
SEATS_A_STAGE = 64
# Share of running sequences from which a pipeline counts as full.
FULL = 0.9


def time_start(replicas: int, stages: int, directory: Path) -> dict[str, float]:
    profile = replace(preset("gpt3-a100-tp8pp8"), hidden_size=64)
    (directory / "profile.json").write_text(json.dumps(profile.to_json()))
    prompts, output = directory / "prompts.jsonl", directory / "answers.jsonl"
    write_prompts(prompts, parse_workload(f"fixed:n={replicas},prompt=16,output=2").requests())
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--emulate", str(directory / "profile.json")]
    command += ["--stages", str(stages), "--replicas", str(replicas), "--input", str(prompts)]
    command += ["--output", str(output), "--overwrite", "--quiet"]
    begin_s = time.monotonic()
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    end_s = time.monotonic()
    # Traces have the clock of this process, because all ranks are on this machine.
    leaders = [traces[0] for traces in find_traces(output.with_name(f"{output.name}.run"), None)]
    issues_s = [next(event.at_s for event in read_trace(path) if isinstance(event, Issued)) for path in leaders]
    return {
        "first microbatch, s": min(issues_s) - begin_s,
        "first of every replica, s": max(issues_s) - begin_s,
        "end, s": end_s - begin_s,
    }


def time_starts(rounds: int) -> dict[str, Any]:
    before, found = os.getloadavg(), {}
    with TemporaryDirectory() as directory, stolen() as lost:
        time_start(*SHAPES[0], Path(directory))
        for replicas, stages in SHAPES:
            starts = [time_start(replicas, stages, Path(directory)) for _ in range(rounds)]
            row = {name: spread([start[name] for start in starts]) for name in starts[0]}
            found[str(replicas * stages)] = {"replicas": replicas, "stages": stages, **row}
            print(f"{replicas * stages:3} ranks  {json.dumps(row)}", flush=True)
    return {"rounds": rounds, "load average": [*before, *os.getloadavg()], "stolen": lost.share, "by ranks": found}


class Ring:
    """The edges of a pipeline inside this process. A microbatch passes all stages in one call."""

    def __init__(self, num_ranks: int) -> None:
        self._edges = [QueueChannel[None](SystemClock(), 1) for _ in range(num_ranks)]

    def through(self, microbatch: MicroBatch) -> StepResult:
        """Send a microbatch through all stages and return its result. Each stage adds its time, the last one draws."""
        frame = MicroBatchFrame(microbatch)
        for edge in self._edges[:-1]:
            frame = self._over(edge, replace(frame, stage_times=(*frame.stage_times, *times_of(microbatch, 1))))
        times = (*frame.stage_times, *times_of(microbatch, 1))
        result = StepResult(microbatch.index, drawn(frame.microbatch), times)
        back: StepResult = self._over(self._edges[-1], result)
        return back

    def _over(self, edge: QueueChannel[None], frame: Any) -> Any:
        edge.reserve()
        edge.send(frame)
        message = edge.receive(0)
        assert message is not None
        message.release()
        return message.frame


def times_of(microbatch: MicroBatch, num_ranks: int) -> tuple[StageTime, ...]:
    return (StageTime(microbatch.index, 0.01),) * num_ranks


def drawn(microbatch: MicroBatch) -> tuple[SampledToken, ...]:
    chunks = (chunk for chunk in microbatch.chunks if chunk.sampling is not None)
    return tuple(SampledToken(chunk.sequence, chunk.epoch, 7) for chunk in chunks)


def stages_like_the_presets(num_ranks: int) -> CostModel:
    cost = preset("gpt3-a100-tp8pp8").cost
    layers = ((index, index + 1) for index in range(num_ranks))
    return replace(cost, stages=tuple(replace(cost.stages[0], layers=own) for own in layers))


class Sample(NamedTuple):
    """The times of one microbatch.

    Attributes:
        step_s: CPU seconds of the coordinator's rank to issue it.
        result_s: CPU seconds of that rank to take in its result.
        stage_s: modelled seconds of a stage of the preset.
    """

    step_s: float
    result_s: float
    stage_s: float
    decodes: int


def samples(policy: PolicySpec, num_ranks: int) -> Iterator[Sample]:
    """Yield the times of microbatches without end, after nine tenths of the seats are taken."""
    seats, cost = SEATS_A_STAGE * num_ranks, stages_like_the_presets(num_ranks)
    limits = Limits(num_ranks, policy.kind.default_chunk_size, seats, 4096, 16, seats * 64, policy.inflight(num_ranks))
    coordinator = Coordinator(limits, policy.make(), cost=cost if policy.kind.wants_cost else None)
    arriving, ring, inflight = requests(), Ring(num_ranks), deque[MicroBatch]()
    step_s = 0.0
    while True:
        while coordinator.num_waiting < num_ranks:
            coordinator.submit(next(arriving))
        began = time.thread_time()
        microbatch = coordinator.next_microbatch()
        if microbatch is not None:
            encode(MicroBatchFrame(microbatch), microbatch.index)
            inflight.append(microbatch)
        step_s += time.thread_time() - began
        if len(inflight) < limits.inflight and microbatch is not None:
            continue
        oldest = inflight.popleft()
        if coordinator.num_running < FULL * seats:  # filling takes thousands of microbatches, so they skip the ring
            coordinator.complete(StepResult(oldest.index, drawn(oldest), times_of(oldest, num_ranks)))
            step_s = 0.0
            continue
        received = encode(ring.through(oldest), oldest.index)
        began = time.thread_time()
        frame = decode(received).frame
        assert isinstance(frame, StepResult)
        coordinator.complete(frame)
        result_s = time.thread_time() - began
        yield Sample(step_s, result_s, cost.seconds(0, Load.of(oldest)), oldest.num_decodes)
        step_s = 0.0


def time_coordinator(policy: str, ranks: Sequence[int], turns: int, steps: int) -> dict[int, dict[str, float]]:
    """Return milliseconds per microbatch by number of ranks. stage_ms is the modelled time of a stage of the preset."""
    sources = {num_ranks: samples(parse_policy(policy), num_ranks) for num_ranks in ranks}
    for source in sources.values():
        next(source)
    gc.collect()
    gc.freeze()
    means: dict[int, list[Sequence[float]]] = {num_ranks: [] for num_ranks in ranks}
    for _ in range(turns):
        for num_ranks, source in sources.items():
            turn = islice(source, steps)
            means[num_ranks].append([statistics.fmean(column) for column in zip(*turn, strict=True)])
    gc.unfreeze()
    return {num_ranks: _row(found) for num_ranks, found in means.items()}


def _row(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    step_s, result_s, stage_s, decodes = (statistics.median(column) for column in zip(*turns, strict=True))
    both_s = statistics.median(step + result for step, result, *_ in turns)
    return {
        "step_ms": 1e3 * step_s,
        "result_ms": 1e3 * result_s,
        "both_ms": 1e3 * both_s,
        "stage_ms": 1e3 * stage_s,
        "share_of_a_core": both_s / stage_s,
        "decodes_a_microbatch": decodes,
    }


def fit_line(costs_ms: Mapping[int, float]) -> dict[str, float]:
    """Fit cost = fixed + a_rank * ranks by least squares. The residual is the largest error, as a share of the cost."""
    ranks, costs = np.array([*costs_ms], dtype=float), np.array([*costs_ms.values()])
    a_rank, fixed = np.polyfit(ranks, costs, 1)
    off = np.abs(fixed + a_rank * ranks - costs) / costs
    return {"fixed_ms": float(fixed), "a_rank_ms": float(a_rank), "residual": float(off.max())}


def time_coordinators(policies: Iterable[str], turns: int, steps: int) -> dict[str, Any]:
    before, found = os.getloadavg(), {}
    for policy in policies:
        rows = time_coordinator(policy, RANKS, turns, steps)
        line = fit_line({num_ranks: row["both_ms"] for num_ranks, row in rows.items()})
        for num_ranks, row in rows.items():
            print(f"{policy:10} {num_ranks:3} ranks  " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        print(f"{policy:10} {json.dumps(line)}", flush=True)
        found[policy] = {"by ranks": {str(num_ranks): row for num_ranks, row in rows.items()}, "line": line}
    load = [*before, *os.getloadavg()]
    return {"turns": turns, "steps a turn": steps, "load average": load, "policies": found}


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Starts of each shape.")
@click.option("--turns", type=click.IntRange(min=1), default=11, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Microbatches per turn.")
@click.option("--policy", "policies", multiple=True, default=("balanced", "sarathi"), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(rounds: int, turns: int, steps: int, policies: tuple[str, ...], output: Path | None) -> None:
    record = Record.begin()
    coordinator = time_coordinators(policies, turns, steps)
    figures = {"start": time_starts(rounds), "coordinator": coordinator}
    print(json.dumps(record.write(output, figures)))


if __name__ == "__main__":
    main()
