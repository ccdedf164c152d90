"""Measure the memory that one long prompt takes in the KV pages and states of each stage, beside what capacity counts.

    python examples/benchmarks/measure_kv_memory.py /tmp/latent /tmp/hybrid --output kv-memory.json

counted    bytes of the pages that the request needs, and of its states
resident   bytes of memory in use at the end of the run, in the mappings that hold the pages and states
others     most bytes by which the rest of the process grew while the last half of the prompt was computed

A KV cache is reserved as a whole, but memory is in use only where it was written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click
import psutil
import torch
from record import Record

from sarathi_pp.model.checkpoint.support import check_model
from sarathi_pp.model.kv import page_bytes
from sarathi_pp.model.layer_cache import state_bytes

STAGES = 2
OUTPUT = 4
LOOK_S = 0.5
# Tensors of a KV cache that reserves some GiB are larger than this, and no other anonymous mapping of a stage is.
LEAST_BYTES = 100 << 20
KV_CACHE = 4 << 30
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)")


@dataclass(frozen=True, slots=True)
class Resident:
    """The resident bytes of a process: of the KV cache, and of everything else."""

    kv: int
    others: int

    @classmethod
    def of(cls, pid: int) -> Resident:
        kv = others = 0
        for size, name, resident in mappings(Path(f"/proc/{pid}/smaps").read_text().splitlines()):
            if size >= LEAST_BYTES and not name:
                kv += resident
            else:
                others += resident
        return cls(kv, others)


def mappings(lines: list[str]) -> Iterator[tuple[int, str, int]]:
    """Yield the size, name and resident bytes of each mapping that Linux lists in `smaps`."""
    size, name = 0, ""
    for line in lines:
        if header := _HEADER.fullmatch(line):
            size, name = int(header[2], 16) - int(header[1], 16), header[3]
        elif line.startswith("Rss:"):
            yield size, name, int(line.split()[1]) << 10


def watch(process: subprocess.Popen[bytes]) -> dict[int, list[Resident]]:
    """Return what was resident in each stage, at each look until the process ended. Stages are named by their pid."""
    looks: dict[int, list[Resident]] = {}
    root = psutil.Process(process.pid)
    while process.poll() is None:
        for child in root.children(recursive=True):
            try:
                resident = Resident.of(child.pid)
            except OSError:  # the process has ended
                continue
            if resident.kv:
                looks.setdefault(child.pid, []).append(resident)
        time.sleep(LOOK_S)
    return looks


def measure(model: Path, prompt: int, directory: Path) -> dict[str, Any]:
    rng = Random(0)
    request = {"prompt_token_ids": [rng.randrange(3, 32000) for _ in range(prompt)], "max_tokens": OUTPUT}
    source, run_dir = directory / "prompt.jsonl", directory / "run"
    source.write_text(json.dumps(request) + "\n")
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(model), "--stages", str(STAGES)]
    command += ["--input", str(source), "--output", str(directory / "answer.jsonl"), "--run-dir", str(run_dir)]
    command += ["--max-model-len", str(prompt + OUTPUT), "--kv-cache-memory", str(KV_CACHE), "--quiet"]
    process = subprocess.Popen(command)
    looks = watch(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    run = json.loads((run_dir / "run.json").read_text())
    facts, dtype = check_model(model), getattr(torch, run["dtype"])
    pages = -(-(prompt + OUTPUT - 1) // run["page_size"])  # the last token is drawn, and not computed
    stages = []
    for (first, end), (_, seen) in zip(run["layers"], sorted(looks.items()), strict=True):
        caches = facts.caches[first:end]
        counted = pages * page_bytes(caches, run["page_size"], dtype) + state_bytes(caches, dtype.itemsize)
        most = max(look.kv for look in seen)
        late = [look.others for look in seen if look.kv > most / 2]
        grown = max(late) - late[0]
        stages.append({"layers": [first, end], "counted": counted, "resident": most, "others": grown})
    return {"model": model.name, "dtype": run["dtype"], "prompt": prompt, "pages": pages, "stages": stages}


@click.command()
@click.argument("models", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--prompt", type=click.IntRange(min=1), default=32768, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(models: tuple[Path, ...], prompt: int, output: Path | None) -> None:
    record, rows = Record.begin(), []
    for model in models:
        with TemporaryDirectory() as directory:
            rows.append(measure(model, prompt, Path(directory)))
        for index, stage in enumerate(rows[-1]["stages"]):
            counted, resident, others = (stage[name] / 1e6 for name in ("counted", "resident", "others"))
            click.echo(
                f"{model.name}, stage {index}: {counted:.2f} MB counted, {resident:.2f} resident, "
                f"{resident / counted:.3f} of it; others grew by {others:.1f} MB"
            )
    record.write(output, {"rows": rows})


if __name__ == "__main__":
    main()
