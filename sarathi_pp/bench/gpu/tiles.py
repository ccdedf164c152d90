"""A comparison of tiles of our attention kernel for prompt chunks, so that one run on a GPU decides between them.

A tile is a block of rows (tokens times query heads that share a KV head) that a program holds while it reads blocks of
keys. The tile in use is the first one. docs/benchmarks/FAILED.md shows what the machine code says of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from sarathi_pp_kernels.triton.attention_work import Blocks, Extent, cut_work
from torch import Tensor

from sarathi_pp.bench.gpu.attention import call_of_layers, random_query, serving
from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.plan import Bench
from sarathi_pp.bench.gpu.stage import Extents, ModelShape, filled_shard, lay_out
from sarathi_pp.model.inputs import build_inputs
from sarathi_pp.model.kv import KVShard

# Most norm of the difference of two tiles' outputs, relative to the norm of the first one.
_MOST_DISTANCE = 0.01
_PAGE_SIZE = 16


def tiles(bench: Bench, figures: Figures) -> None:
    """Time the attention of one layer with each tile, on every microbatch with a chunk, for two head sizes."""
    bench.forget()  # the weights of the large model are not needed here
    for shape in (bench.sizes.large, bench.sizes.wide):
        if "triton" not in serving(bench, bench.dtype, shape):
            figures["reason"] = "the triton backend does not run here"
            return
        shape = replace(shape, num_layers=bench.sizes.layers)
        found: Figures = figures.setdefault(f"heads of {shape.head_dim}", {})
        kv = filled_shard(shape, -(-bench.sizes.kv_tokens // _PAGE_SIZE), _PAGE_SIZE, bench.dtype, bench.device)
        for what, extents in bench.sizes.attention.items():
            if any(count > 1 for _, count in extents):
                found[what] = _compare(bench, shape, kv, what, extents)
                bench.save()


def candidates(group: int, head_dim: int, itemsize: int) -> dict[str, Blocks]:
    """Return tiles by name, the one in use first. Float32 has no others: more rows were seen to spill registers.

    Args:
        group: number of query heads that share a KV head.
        itemsize: bytes of a query, key or value.
    """
    own = Blocks.of(group, head_dim, itemsize)
    others: list[Blocks] = []
    if itemsize == 2 and head_dim <= 128:
        # Two programs fit on a processor of a Hopper GPU: the products of one run during the softmax of the other. Long
        # contexts are cut for two. In the last one, a program's own products run during its softmax.
        others = [
            replace(own, many_rows=64, many_programs=2),
            replace(own, keys=32, registers=128, many_programs=2),
            replace(own, ahead=True),
        ]
    elif itemsize == 2:
        others = [replace(own, many_rows=128)]
    chosen = {_name(blocks): blocks for blocks in (own, *others) if blocks.many_rows >= blocks.few_rows}
    return chosen


def _name(blocks: Blocks) -> str:
    limit = "" if blocks.registers is None else f", {blocks.registers} registers"
    return f"{blocks.many_rows} rows x {blocks.keys} keys{limit}{', ahead' if blocks.ahead else ''}"


def _compare(bench: Bench, shape: ModelShape, kv: KVShard, what: str, extents: Extents) -> Figures:
    query = random_query(bench, shape, extents)
    group = shape.num_heads // shape.num_kv_heads
    attends = {
        name: _attending(bench, shape, kv, query, extents, blocks)
        for name, blocks in candidates(group, shape.head_dim, bench.dtype.itemsize).items()
    }
    outputs = {name: attend(0) for name, attend in attends.items()}
    (_, in_use), *others = outputs.items()
    for name, output in others:
        distance = float((output.float() - in_use.float()).norm() / in_use.float().norm())
        near = f"heads of {shape.head_dim}, {what}: {name} is near to the tile in use"
        bench.check(near, distance <= _MOST_DISTANCE, True)
    calls = [call_of_layers(bench, shape.num_layers, attend) for attend in attends.values()]
    return {
        name: {
            "s": taken["s"] / shape.num_layers,
            "quartiles_s": [one / shape.num_layers for one in taken["quartiles_s"]],
            "equal_bits": torch.equal(outputs[name], in_use),
        }
        for name, taken in zip(attends, bench.seconds(*calls), strict=True)
    }


def _attending(
    bench: Bench, shape: ModelShape, kv: KVShard, query: Tensor, extents: Extents, blocks: Blocks
) -> Callable[[int], Tensor]:
    from sarathi_pp_kernels.triton.paged_attention import paged_attention  # needs Triton, which not every machine has

    inputs = build_inputs(lay_out(extents, _PAGE_SIZE, kv.num_pages), (), _PAGE_SIZE, bench.device)
    parts = [Extent(span.first_row, span.num_tokens, span.start, span.first_page) for span in inputs.spans]
    processors = torch.cuda.get_device_properties(bench.device).multi_processor_count
    work = cut_work(parts, blocks, None, shape.num_kv_heads, processors, bench.device)

    def attend(layer: int) -> Tensor:
        pools = kv.keys(layer), kv.values(layer)
        how = {"scaling": shape.head_dim**-0.5, "softcap": None, "sinks": None}
        return paged_attention(query, *pools, inputs.pages, work, **how)

    return attend
