"""What tracing costs: the same work with events recorded and with `record` doing nothing, in turn.

    python examples/measure_tracing.py --work-dir /tmp/m300 --output examples/figures/tracing-cost.json

Two stages under torchrun, one compute thread each, on the 298M model of measure_300m.py: 8 prompts of 256 tokens
with 24 new ones each, so that most microbatches are short and events many. Seconds are the engine's own, from the
first row to the last answer; loading lies outside. Order alternates from round to round. What "off" leaves running are
the clock reads around a span and the making of events. Last, what recording and writing an event costs by itself.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import click
from measure_300m import make_checkpoint

_WORKER = "SARATHI_PP_MEASURE_TRACING"  # set for the ranks that torchrun starts: on, or off


def work(traced: bool, seconds_path: Path) -> None:
    """One rank of a run; rank 0 writes down how long the engine took."""
    from sarathi_pp.cli.main import main as command
    from sarathi_pp.runtime.engine import Engine
    from sarathi_pp.runtime.job import Job
    from sarathi_pp.trace.clock import SystemClock
    from sarathi_pp.trace.recorder import Recorder

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


def make_workload(path: Path) -> None:
    draw = random.Random(0)
    rows = [
        {
            "prompt_token_ids": [draw.randrange(32000) for _ in range(256)],
            "max_new_tokens": 24,
            "ignore_eos": True,
        }
        for _ in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_once(work_dir: Path, traced: bool, port: int) -> float:
    """Seconds of one run."""
    seconds = work_dir / "seconds"
    seconds.unlink(missing_ok=True)
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2")
    command = (
        *(*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(port), __file__, "generate"),
        *("--model", str(work_dir / "model"), "--input", str(work_dir / "short.jsonl")),
        *("--output", str(work_dir / "short-answers.jsonl"), "--overwrite", "--quiet"),
    )
    environment = {**os.environ, _WORKER: f"{'on' if traced else 'off'}:{seconds}"}
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    return float(seconds.read_text())


def cost_of_events(trace: Path, run_s: float) -> dict[str, float]:
    """Record a run's events of rank 0, which has most, once more, 40 times over: what each costs and all together."""
    from sarathi_pp.trace.clock import SystemClock
    from sarathi_pp.trace.recorder import Recorder, read_trace

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
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes.")
def main(work_dir: Path, rounds: int, output: Path | None) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    make_workload(work_dir / "short.jsonl")
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for index in range(rounds):
        for traced in (True, False) if index % 2 else (False, True):
            seconds["on" if traced else "off"].append(run_once(work_dir, traced, 29700 + index))
        print(f"round {index + 1}  on {seconds['on'][-1]:.3f} s  off {seconds['off'][-1]:.3f} s", flush=True)
    run_once(work_dir, True, 29699)
    trace = work_dir / "short-answers.jsonl.run" / "attempt-0000" / "trace-00000-of-00002.jsonl"
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=True)
    document = {
        "commit": commit.stdout.strip(),
        "command": "python examples/measure_tracing.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        "seconds": seconds,
        "seconds with tracing / without": {
            "of medians": statistics.median(seconds["on"]) / statistics.median(seconds["off"]),
            "median of pairs": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        },
        "of one run": cost_of_events(trace, statistics.median(seconds["on"])),
    }
    print(json.dumps({key: document[key] for key in ("seconds with tracing / without", "of one run")}, indent=2))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if _WORKER in os.environ:
        mode, _, where = os.environ[_WORKER].partition(":")
        work(mode == "on", Path(where))
    else:
        main()
