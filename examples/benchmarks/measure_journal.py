"""Measure the cost of the journal: one run that writes and syncs answers for some seconds, then drops them for some.

    python examples/benchmarks/measure_journal.py --work-dir /tmp/journal --times 20 \
        --output docs/benchmarks/results/journal-cost.json

There are two stages on a Llama of two layers with random weights, with one compute thread each. Rows have outputs of a
few tokens. So the run answers hundreds of requests per second, far more than a real model on these cores. In "off"
blocks the lines are still made. With --times 20 every group of lines is appended and synced 20 times, to a file next to
the output. The difference is then the cost of 20 journals, and a twentieth of it is the cost of one. The same holds for
its confidence bounds. See blocks.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import click
from awake import awake
from blocks import block_of, interval_of_blocks, is_on, of_one, ratios, spread
from record import Record

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.clock import SystemClock

# The file in which rank 0 of the run writes the end times of rows and the durations of syncs.
_WORKER = "SARATHI_PP_MEASURE_JOURNAL"
_TIMES = "SARATHI_PP_MEASURE_JOURNAL_TIMES"


def make_checkpoint(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class Beside:
    """A replacement for the output's journal. It writes several times in "on" blocks, and nothing in the others.

    Args:
        times: how often each group of lines is written.
    """

    def __init__(self, path: str, times: int) -> None:
        from sarathi_pp.outputs.journal import Journal

        # Keep the methods of Journal, because the caller replaces them next.
        self._open, self._append, self._sync = Journal.open, Journal.append, Journal.sync
        self._path = path
        self._times = range(times)
        self._journal: Any = None  # only rank 0 makes one
        self._clock = SystemClock()
        self.syncs_s: list[float] = []

    def _on(self) -> bool:
        return is_on(block_of(self._clock.now()))

    def append(self, data: bytes) -> None:
        if self._journal is None:
            self._journal = self._open(self._path, "replace")
        for _ in self._times if self._on() else ():
            self._append(self._journal, data)

    def sync(self) -> None:
        for _ in self._times if self._on() else ():
            begin_s = self._clock.now()
            self._sync(self._journal)
            self.syncs_s.append(self._clock.now() - begin_s)


def work(results_path: Path) -> None:
    """Run one rank of the run."""
    from sarathi_pp.cli.main import main as command
    from sarathi_pp.engine.engine import Engine
    from sarathi_pp.outputs.journal import Journal
    from sarathi_pp.run.rank import Rank

    clock, finish_row = SystemClock(), Engine._finish
    ended_s: list[float] = []
    beside = Beside(f"{results_path}.lines", int(os.environ[_TIMES]))

    def timed(self: Engine, *arguments: Any) -> None:
        ended_s.append(clock.now())
        finish_row(self, *arguments)

    def finish(self: Rank, facts: Any = None) -> None:
        """Skip the report, because some answers were dropped."""
        self.abandon()
        if ended_s:
            results_path.write_text(json.dumps([ended_s, beside.syncs_s]))

    with (
        mock.patch.object(Journal, "append", lambda self, data: beside.append(data)),
        mock.patch.object(Journal, "sync", lambda self: beside.sync()),
        mock.patch.object(Engine, "_finish", timed),
        mock.patch.object(Rank, "finish", finish),
    ):
        command()


def run(work_dir: Path, requests: int, times: int) -> tuple[list[float], list[float]]:
    """Run once. Return the times at which rows ended, and the duration of each sync in seconds."""
    prompts, answers, results = (work_dir / f"journal{end}" for end in (".jsonl", "-answers.jsonl", "-results.json"))
    write_prompts(prompts, parse_workload(f"fixed:n={requests},prompt=32,output=8,seed=0").requests())
    results.unlink(missing_ok=True)
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    command = (
        *(*torchrun, "--master-port", "29701", __file__, "generate", "--model", str(work_dir / "tiny")),
        *("--input", str(prompts), "--output", str(answers), "--overwrite", "--quiet", "--ignore-eos"),
    )
    worker = {_WORKER: str(results), _TIMES: str(times)}
    subprocess.run(command, env={**os.environ, **worker}, check=True, stderr=subprocess.DEVNULL)
    ended_s, syncs = json.loads(results.read_text())
    return ended_s, syncs


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--requests", type=click.IntRange(min=1000), default=40_000, show_default=True)
@click.option(
    "--times", type=click.IntRange(min=1), default=1, show_default=True, help="How often to write each group."
)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(work_dir: Path, requests: int, times: int, output: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "tiny" / "config.json").exists():
        make_checkpoint(work_dir / "tiny")
    with awake():
        ended_s, syncs = run(work_dir, requests, times)
    between = spread(list(ratios(interval_of_blocks(ended_s))))
    rate = len(ended_s) / (ended_s[-1] - ended_s[0])
    document = record.write(
        output,
        {
            "seconds": ended_s[-1] - ended_s[0],
            "requests a second": rate,
            "each group written": times,
            "time between rows, written / dropped": between,
            "cost of one journal, share of the run": of_one(between, times),
            "syncs": len(syncs) // times,
            "ms a sync": spread([1e3 * seconds for seconds in syncs]),
        },
    )
    print(json.dumps(document))


if __name__ == "__main__":
    if _WORKER in os.environ:
        work(Path(os.environ[_WORKER]))
    else:
        main()
