"""Measure the cost of tracing: one run that records events for some seconds, then drops them for some.

    python examples/benchmarks/measure_tracing.py --work-dir /tmp/m300 \
        --output docs/benchmarks/results/tracing-cost.json

There are two stages on the 298M model of measure_300m.py, with one compute thread each. Eight requests only decode, so
microbatches are short and there are many events per second. In "off" blocks the clock is still read around a span, and
events are still made. With --times 50 every event is recorded 50 times, through the same queue, thread and file. The
difference is then the cost of 50 traces, and a fiftieth of it is the cost of one. The same holds for its confidence
bounds. See blocks.py.

The cores are kept awake. The figure of a block is the mean time between its results, without its first second: the
trace is written twice per second, so earlier events may be written in that second. The last figures are the cost of
recording and writing an event alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import click
from awake import awake
from blocks import block_of, interval_of_blocks, is_on, of_one, ratios, spread
from measure_300m import make_checkpoint
from record import Record

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.recorder import Recorder, read_trace

_WORKER = "SARATHI_PP_MEASURE_TRACING"  # file in which rank 0 of the run writes the times of results
_TIMES = "SARATHI_PP_MEASURE_TRACING_TIMES"
SEQS = 8


def work(results_path: Path) -> None:
    """Run one rank of the run."""
    from sarathi_pp.cli.main import main as command
    from sarathi_pp.core.coordinator import Coordinator
    from sarathi_pp.run.rank import Rank

    clock, record, complete = SystemClock(), Recorder.record, Coordinator.complete
    results_s: list[float] = []
    times = range(int(os.environ[_TIMES]))

    def record_in_turn(self: Recorder, event: Any) -> None:
        if is_on(block_of(clock.now())):
            for _ in times:
                record(self, event)

    def timed(self: Coordinator, result: Any) -> Any:
        results_s.append(clock.now())
        return complete(self, result)

    def finish(self: Rank, facts: Any = None) -> None:
        """Skip the report, because the trace is incomplete."""
        self.abandon()
        if results_s:
            results_path.write_text(json.dumps(results_s))

    with (
        mock.patch.object(Recorder, "record", record_in_turn),
        mock.patch.object(Coordinator, "complete", timed),
        mock.patch.object(Rank, "finish", finish),
    ):
        command()


def run(work_dir: Path, output_tokens: int, times: int) -> tuple[list[float], Path]:
    """Run once. Return the times of the results, and the trace of rank 0, which has most events."""
    prompts, answers, results = (work_dir / f"tracing{end}" for end in (".jsonl", "-answers.jsonl", "-results.json"))
    write_prompts(prompts, parse_workload(f"fixed:n={SEQS},prompt=64,output={output_tokens},seed=0").requests())
    results.unlink(missing_ok=True)
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    command = (
        *(*torchrun, "--master-port", "29700", __file__, "generate", "--model", str(work_dir / "model")),
        *("--input", str(prompts), "--output", str(answers), "--overwrite", "--quiet"),
    )
    worker = {_WORKER: str(results), _TIMES: str(times)}
    subprocess.run(command, env={**os.environ, **worker}, check=True, stderr=subprocess.DEVNULL)
    trace = work_dir / "tracing-answers.jsonl.run" / "attempt-0000" / "trace-00000-of-00002.jsonl"
    return json.loads(results.read_text()), trace


def cost_of_events(trace: Path, traced_s: float, times: int) -> dict[str, float]:
    """Record the events of a run again, 20 times. Return the cost per event, and of all events per time of the run.

    Args:
        traced_s: seconds of the run in which these events were recorded.
        times: how often the run recorded each event.
    """
    events = list(read_trace(trace))[::times] * 20
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
        "events a second": len(events) / 20 / traced_s,
        "stage loop, us an event": loop_s / len(events) * 1e6,
        "all threads, CPU us an event": cpu_s / len(events) * 1e6,
        "CPU share of a core": cpu_s / 20 / traced_s,
    }


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--output-tokens", type=click.IntRange(min=100), default=2000, show_default=True, help="Output tokens per request."
)
@click.option(
    "--times", type=click.IntRange(min=1), default=1, show_default=True, help="How often to record each event."
)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(work_dir: Path, output_tokens: int, times: int, output: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    with awake():
        results_s, trace = run(work_dir, output_tokens, times)
    intervals = interval_of_blocks(results_s)
    between = spread(list(ratios(intervals)))
    document = record.write(
        output,
        {
            "seconds": results_s[-1] - results_s[0],
            "microbatches": len(results_s),
            "each event recorded": times,
            "time between results, traced / untraced": between,
            "cost of one trace, share of the run": of_one(between, times),
            "events": cost_of_events(trace, (results_s[-1] - results_s[0]) / 2, times),
            "ms between results by block": [
                {"traced": is_on(block), "ms": 1e3 * interval} for block, interval in intervals.items()
            ],
        },
    )
    print(json.dumps({name: value for name, value in document.items() if name != "ms between results by block"}))


if __name__ == "__main__":
    if _WORKER in os.environ:
        work(Path(os.environ[_WORKER]))
    else:
        main()
