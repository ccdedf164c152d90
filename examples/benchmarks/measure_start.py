"""Measure how soon a command answers, and how much memory a run takes: two stages of a checkpoint, one core each.

    python examples/benchmarks/measure_start.py --model /tmp/m300/model --output docs/benchmarks/results/start.json

help          `sarathi-pp --help`, from its start to its end.
first token   `sarathi-pp generate` with one prompt of 16 tokens and 16 output tokens, from the command to its first
              token and to its end. The first token has passed both stages. An uncounted run before it compiles kernels
              and reads files.
memory        One run of 32 prompts of 256 to 1,024 tokens: the most memory of all processes, measured once per second.
              A shared page counts once. It is compared with the sum of 1.5 times the weights, the KV pages of the
              requests, and 450 MB per stage. Pages of torch's code that this program shares count only in part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch
from record import Record, spread

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.bench.footprint import Footprint
from sarathi_pp.bench.machine import stolen
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.model.kv import page_bytes
from sarathi_pp.report.run_reader import find_traces
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.events import RequestFinished
from sarathi_pp.trace.recorder import read_trace

STAGES = 2
PROMPT = "uniform:n=1,min=16,max=16,pd=1,seed=0"
WORK = "uniform:n=32,min=256,max=1024,pd=8,seed=0"
PAGE_SIZE = 16
STAGE_BYTES = 450e6


def generate(model: Path, workload: str, directory: Path, footprint: Footprint | None = None) -> dict[str, float]:
    """Return the seconds from the command to the first token of all requests, and to its end.

    Args:
        footprint: measures the memory of the run, if given.
    """
    prompts, output = directory / "prompts.jsonl", directory / "answers.jsonl"
    write_prompts(prompts, parse_workload(workload).requests())
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(model), "--stages", str(STAGES)]
    command += ["--input", str(prompts), "--output", str(output), "--overwrite", "--quiet"]
    begin_s = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with footprint.watching(process.pid) if footprint else nullcontext():
        code = process.wait()
        end_s = time.monotonic()
    if code:
        raise subprocess.CalledProcessError(code, command)
    events = read_trace(find_traces(output.with_name(f"{output.name}.run"), None)[0][0])
    finished = [event for event in events if isinstance(event, RequestFinished)]
    first_s = min(event.first_token_s for event in finished if event.first_token_s is not None)
    return {"first token, s": first_s - begin_s, "end, s": end_s - begin_s}


def seconds_of_help() -> float:
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-m", "sarathi_pp", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin_s


def allowed_bytes(model: Path) -> dict[str, float]:
    facts = check_model(model)
    page = page_bytes(facts.caches, PAGE_SIZE, torch.bfloat16)
    pages = sum(
        -(-(len(request.prompt_token_ids) + request.sampling.max_new_tokens) // PAGE_SIZE)
        for request in parse_workload(WORK).requests()
    )
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return {"1.5 x weights": 1.5 * weights, "KV": page * pages, "450 MB a stage": STAGE_BYTES * STAGES}


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Checkpoint that measure_300m.py made.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: Path, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:STAGES])
    footprint = Footprint()
    helps, starts = [], []
    with TemporaryDirectory() as directory, stolen() as lost:
        for turn in range(rounds + 1):
            help_s, start = seconds_of_help(), generate(model, PROMPT, Path(directory))
            if turn:
                helps.append(help_s)
                starts.append(start)
        generate(model, WORK, Path(directory), footprint)
    allowed = allowed_bytes(model)
    figures = {
        "help, s": spread(helps),
        **{name: spread([start[name] for start in starts]) for name in starts[0]},
        "peak bytes": footprint.peak_bytes,
        "allowed bytes": {**allowed, "in all": sum(allowed.values())},
    }
    print(json.dumps(figures, indent=1))
    record.write(output, {"rounds": rounds, "stolen": lost.share, **figures})


if __name__ == "__main__":
    main()
