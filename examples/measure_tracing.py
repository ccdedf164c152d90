"""What tracing costs: the same work with events recorded and with `record` doing nothing, in turn.

    python examples/measure_tracing.py --work-dir /tmp/m300 --output examples/figures/tracing-cost.json

Two stages under torchrun, one compute thread each. Seconds are the engine's own, from the first row to the last answer;
loading lies outside. Order alternates from round to round. What "off" leaves running are the clock reads around a span
and the making of events.

    real      the 298M model of measure_300m.py: 8 prompts of 256 tokens with 24 new ones each, so most microbatches
              are short and events many. Holds all of the cost, under the scatter of two computing cores.
    emulated  stages that sleep 4 ms and a little for each microbatch, of which there are about a thousand. Steady, and
              holds what a stage waits for its events; what their writing takes from a computing core it does not.

Last, what recording and writing an event costs by itself.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
from measure_300m import make_checkpoint, write_prompts
from record import Record

from sarathi_pp.core.cost import CostModel, StageCost
from sarathi_pp.core.profile import Profile
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.latency import percentile
from sarathi_pp.trace.recorder import Recorder, read_trace

_WORKER = "SARATHI_PP_MEASURE_TRACING"  # set for the ranks that torchrun starts: on, or off
REAL = "fixed:n=8,prompt=256,output=24,seed=0"
EMULATED = "fixed:n=64,prompt=64,output=64,seed=0"
# Few at once make many microbatches.
EMULATED_SEQS = 8
RESAMPLES = 10_000


def work(traced: bool, seconds_path: Path) -> None:
    """One rank of a run; rank 0 writes down how long the engine took."""
    from sarathi_pp.cli.main import main as command
    from sarathi_pp.runtime.engine import Engine
    from sarathi_pp.runtime.job import Job

    run, clock = Engine.run, SystemClock()

    def timed(self: Engine, *arguments: Any) -> None:
        start_s = clock.now()
        run(self, *arguments)
        seconds_path.write_text(str(clock.now() - start_s))

    with mock.patch.object(Engine, "run", timed):
        if traced:
            command()
        else:
            with (
                mock.patch.object(Recorder, "record", lambda self, event: None),
                mock.patch.object(Job, "finish", lambda self, analyse=None: self._watchdog.dismiss()),
            ):
                command()


def make_profile() -> Profile:
    """Two equal stages of short microbatches that cost much the same whatever they hold."""
    stages = tuple(StageCost((first, first + 8), a0=4e-3, a1=10e-6, a2=0.0, a3=0.0, a4=0.0) for first in (0, 8))
    return Profile(
        model="short-microbatches",
        device="emulated",
        dtype="bfloat16",
        hidden_size=1024,
        num_layers=16,
        cost=CostModel(1, stages),
        link_latency_s=0.0,
        link_bytes_per_s=1e9,
        jitter_cv=0.0,
        pages=1024,
        max_num_seqs=EMULATED_SEQS,
    )


def run_once(answers: Path, given: Sequence[str], traced: bool, port: int) -> float:
    """Seconds of one run. given: what to run, as options of `generate`."""
    seconds = answers.with_suffix(".seconds")
    seconds.unlink(missing_ok=True)
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2")
    command = (
        *(*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(port), __file__, "generate"),
        *(*given, "--output", str(answers), "--overwrite", "--quiet"),
    )
    environment = {**os.environ, _WORKER: f"{'on' if traced else 'off'}:{seconds}"}
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    return float(seconds.read_text())


def compare(name: str, work_dir: Path, given: Sequence[str], rounds: int, port: int) -> dict[str, Any]:
    """A pair of runs each round, what the pairs show, and what the events of the last traced run cost."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for index in range(rounds):
        for mode in ("on", "off") if index % 2 else ("off", "on"):
            answers = work_dir / f"{name}-{mode}.jsonl"
            seconds[mode].append(run_once(answers, given, mode == "on", port + index))
        on_s, off_s = seconds["on"][-1], seconds["off"][-1]
        print(f"{name} {index + 1}  on {on_s:.3f} s  off {off_s:.3f} s  ratio {on_s / off_s:.4f}", flush=True)
    trace = work_dir / f"{name}-on.jsonl.run" / "attempt-0000" / "trace-00000-of-00002.jsonl"
    return {
        "seconds": seconds,
        "seconds with tracing / without": ratios(seconds["on"], seconds["off"]),
        "of one run": cost_of_events(trace, statistics.median(seconds["on"])),
    }


def ratios(on: list[float], off: list[float]) -> dict[str, Any]:
    pairs = sorted(with_s / without_s for with_s, without_s in zip(on, off, strict=True))
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return {
        "of medians": statistics.median(on) / statistics.median(off),
        "median of pairs": statistics.median(pairs),
        "95 % confidence, bootstrap": [percentile(medians, share) for share in (2.5, 97.5)],
        "quartiles of pairs": [percentile(pairs, share) for share in (25, 75)],
        "min": pairs[0],
        "max": pairs[-1],
    }


def cost_of_events(trace: Path, run_s: float) -> dict[str, float]:
    """Record a run's events of rank 0, which has most, once more, 40 times over: what each costs and all together."""
    events = list(read_trace(trace)) * 40
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "trace.jsonl")
        before_s, begin_s = time.process_time(), clock.now()
        for event in events:
            recorder.record(event)
        loop_s = clock.now() - begin_s
        recorder.close()
        cpu_s = time.process_time() - before_s
    return {
        "events": len(events) / 40,
        "stage loop, us an event": loop_s / len(events) * 1e6,
        "all threads, CPU us an event": cpu_s / len(events) * 1e6,
        "CPU share of the run": cpu_s / 40 / run_s,
    }


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--rounds", type=click.IntRange(min=0), default=8, show_default=True, help="Pairs on the model.")
@click.option("--emulated-rounds", type=click.IntRange(min=0), default=12, show_default=True, help="Emulated pairs.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where the JSON goes; written after the real pairs too."
)
def main(work_dir: Path, rounds: int, emulated_rounds: int, output: Path | None) -> None:
    record, figures = Record.begin(), {}
    work_dir.mkdir(parents=True, exist_ok=True)
    if rounds:
        if not (work_dir / "model" / "config.json").exists():
            make_checkpoint(work_dir / "model")
        prompts = work_dir / "tracing-real.jsonl"
        write_prompts(prompts, REAL)
        given = ("--model", str(work_dir / "model"), "--input", str(prompts))
        figures["real"] = compare("real", work_dir, given, rounds, 29700)
        record.write(output, figures)
    if emulated_rounds:
        prompts, profile = work_dir / "tracing-emulated.jsonl", work_dir / "tracing-profile.json"
        write_prompts(prompts, EMULATED)
        profile.write_text(json.dumps(make_profile().to_json()))
        given = ("--emulate", str(profile), "--input", str(prompts))
        figures["emulated"] = compare("emulated", work_dir, given, emulated_rounds, 29800)
        record.write(output, figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    if _WORKER in os.environ:
        mode, _, where = os.environ[_WORKER].partition(":")
        work(mode == "on", Path(where))
    else:
        main()
