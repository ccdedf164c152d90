"""Compare the memory that a long prompt takes in KV pages and states with the memory that capacity counts for it.

    python examples/benchmarks/measure_kv_memory.py /tmp/latent /tmp/hybrid --output kv-memory.json

Each half of the layers computes the prompt, in this process. Linux knows which pages of memory are in use.

counted    bytes of the KV pages that the prompt needs, and of its states
resident   bytes in use of the tensors that hold all KV pages, which are reserved as a whole. A state counts with the
           size of its slot in the tensors that hold the states.
grown      bytes by which the process grew while it computed the second half of the prompt, without the KV pages
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from one_stage import CPU, PAGE_SIZE
from record import Record
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache, state_bytes
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.core.pages import PagePool
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard, page_bytes
from sarathi_pp.model.loader import load_stage

KV_CACHE = 4 << 30
SLOTS = 32
DTYPE = torch.bfloat16


def resident_bytes(tensor: Tensor) -> int:
    """Return how many bytes of a tensor's storage are in memory."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first = begin // page * page
    count = -(-(end - first) // page)
    seen = (ctypes.c_ubyte * count)()
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page), seen):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(one & 1 for one in seen) * page


def tensors_of(kv: KVShard, caches: Sequence[LayerCache]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that hold the KV pages of a stage, and those that hold its states. Each memory comes once."""
    pages: list[Tensor] = []
    states: list[Tensor] = []
    for layer in range(*kv.layers):
        cache = caches[layer]
        if isinstance(cache, PagedCache):
            pages += [kv.keys(layer)] if cache.latent else [kv.keys(layer), kv.values(layer)]
        else:
            states += [kv.conv_state(layer)] + [kv.recurrent_state(layer)] * bool(cache.recurrent)
    return pages, states


def measure(directory: Path, layers: tuple[int, int], prompt: int, chunk: int) -> dict[str, Any]:
    facts = check_model(directory)
    caches = facts.caches[slice(*layers)]
    model = load_stage(directory, layers, facts.num_layers, DTYPE, CPU, choose_backend("auto", CPU, PAGE_SIZE))
    each = page_bytes(caches, PAGE_SIZE, DTYPE)
    if each == 0:
        raise click.ClickException(
            f"layers {layers} of {directory} have no KV pages; choose a model with attention there"
        )
    num_pages = (KV_CACHE - SLOTS * state_bytes(caches, DTYPE.itemsize)) // each
    kv = KVShard(layers, num_pages, PAGE_SIZE, facts.caches, DTYPE, CPU, num_slots=SLOTS)
    pages = -(-prompt // PAGE_SIZE)
    table = PagePool(num_pages, PAGE_SIZE).take(pages)
    kv_pages, states = tensors_of(kv, facts.caches)
    process, before = psutil.Process(os.getpid()), 0
    generator = torch.Generator().manual_seed(1)
    for start in range(0, prompt, chunk):
        count = min(chunk, prompt - start)
        inputs = build_inputs([Span(start, count, table, prompt=True, slot=SLOTS - 1)], (), PAGE_SIZE, CPU)
        x = torch.arange(start, start + count) % facts.vocab_size
        if not model.embed:
            x = torch.randn(count, facts.hidden_size, generator=generator).to(DTYPE)
        model.forward(x, inputs, kv)
        if not before and start + count >= prompt // 2:
            before = process.memory_info().rss - sum(map(resident_bytes, kv_pages))
    counted = pages * page_bytes(caches, PAGE_SIZE, DTYPE) + state_bytes(caches, DTYPE.itemsize)
    taken = sum(map(resident_bytes, kv_pages))
    grown = process.memory_info().rss - taken - before
    taken += sum(tensor.nbytes for tensor in states) // SLOTS
    return {"layers": list(layers), "pages": pages, "counted": counted, "resident": taken, "grown": grown}


@click.command()
@click.argument("models", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--prompt", type=click.IntRange(min=1), default=32768, show_default=True)
@click.option("--chunk", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(models: tuple[Path, ...], prompt: int, chunk: int, output: Path | None) -> None:
    record, rows = Record.begin(), []
    torch.set_num_threads(1)
    for directory in models:
        num_layers = check_model(directory).num_layers
        for layers in ((0, num_layers // 2), (num_layers // 2, num_layers)):
            row = {"model": directory.name, "prompt": prompt, **measure(directory, layers, prompt, chunk)}
            rows.append(row)
            counted, taken, grown = (row[name] / 1e6 for name in ("counted", "resident", "grown"))
            click.echo(
                f"{directory.name}, layers {layers}: {counted:.2f} MB counted, {taken:.2f} resident, "
                f"{taken / counted:.3f} of it; the rest grew by {grown:.1f} MB"
            )
    record.write(output, {"dtype": "bfloat16", "chunk": chunk, "rows": rows})


if __name__ == "__main__":
    main()
