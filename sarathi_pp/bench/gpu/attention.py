"""A comparison of the attention backends of a GPU: exactness and speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.plan import ATTENTION_SHARE, Bench
from sarathi_pp.bench.gpu.stage import (
    Extents,
    GpuStage,
    ModelShape,
    filled_shard,
    lay_out,
    random_model,
    synthetic_tokens,
)
from sarathi_pp.model.attention import BACKENDS, AttentionBackend, Needs, choose_backend, why_not
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.graphs import CudaGraph
from sarathi_pp.model.inputs import build_inputs
from sarathi_pp.model.kv import KVShard

# Largest distance between bfloat16 and float32 logits, relative to the norm of the float32 logits. If it is larger, the
# layers compute something wrong.
_MOST_DISTANCE = 0.05
# Kernels that were written for attention. `sdpa` is not among them, because it runs one sequence after another.
_FUSED = ("triton", "flash", "varlen", "dense")


def logits(bench: Bench, figures: Figures) -> None:
    """Compare bfloat16 logits of a small model with its float32 logits, for each backend and for transformers."""
    shape, dtype, device = bench.sizes.small, torch.bfloat16, bench.device
    extents: Extents = [(0, 100)]
    ids = synthetic_tokens(0, 100, shape.vocab_size)
    theirs = random_model(shape, dtype, device)
    weights = theirs.state_dict()
    exact = GpuStage(shape, torch.float32, device, 512, "sdpa", weights).microbatch(extents)()
    with torch.inference_mode():
        found = theirs(torch.tensor([ids], device=device)).logits[0, -1:]

    def distance(logits: Tensor) -> float:
        return float((logits.float() - exact).norm() / exact.norm())

    figures["transformers"] = distance(found)
    bench.check("transformers' logits are near to float32's", figures["transformers"] < _MOST_DISTANCE, True)
    for name in serving(bench, dtype, shape):
        figures[name] = distance(GpuStage(shape, dtype, device, 512, name, weights).microbatch(extents)())
        bench.check(f"{name}: nearer to float32 than transformers by", figures["transformers"] / figures[name], 0.5)


def attention(bench: Bench, figures: Figures) -> None:
    """Time the attention of one layer with every backend that runs on this device, each with its own page size.

    The calls go through the keys and values of all layers, as in a model, because those of one layer would fit into the
    GPU's cache. All layers are in one CUDA graph. Otherwise the host might need longer to launch the attention of a
    layer than the GPU to run it.
    """
    bench.forget()  # the weights of the large model are not needed here
    shape = replace(bench.sizes.large, num_layers=bench.sizes.layers)
    taken: dict[str, Figures] = {what: {} for what in bench.sizes.attention}
    figures |= {"layers": shape.num_layers, "of_a_layer": taken}
    for name in serving(bench, bench.dtype, shape):
        try:
            _by_backend(bench, shape, name, taken)
        except Exception as error:  # a library is installed and does not run
            for found in taken.values():
                found.setdefault(name, {"error": f"{type(error).__name__}: {error}"})
            bench.check(f"attention {name} runs", False, True)
        bench.save()
    for what, extents in bench.sizes.attention.items():
        if len(extents) == 1:
            taken[what]["dense"] = _of_a_layer(bench, shape.num_layers, _dense(bench, shape, *extents[0]))
        _compare(bench, what, extents, shape, taken[what])


def _by_backend(bench: Bench, shape: ModelShape, name: str, taken: dict[str, Figures]) -> None:
    needs = Needs(bench.dtype, shape.head_dim, softcap=False, sinks=False)
    backend = choose_backend(name, bench.device, None, needs)
    page_size = backend.default_page_size
    kv = filled_shard(shape, -(-bench.sizes.kv_tokens // page_size), page_size, bench.dtype, bench.device)
    for what, extents in bench.sizes.attention.items():
        taken[what][name] = _of_a_layer(bench, shape.num_layers, _paged(bench, shape, backend, kv, extents))


def serving(bench: Bench, dtype: torch.dtype, shape: ModelShape) -> list[str]:
    """Return the names of the attention backends that run on this device."""
    needs = Needs(dtype, shape.head_dim, softcap=False, sinks=False)
    return [name for name in BACKENDS if why_not(name, bench.device, needs) is None]


def random_query(bench: Bench, shape: ModelShape, extents: Extents) -> Tensor:
    """Return random queries of a microbatch: (T, num_heads, head_dim)."""
    rows = sum(count for _, count in extents)
    return torch.randn(rows, shape.num_heads, shape.head_dim, dtype=bench.dtype, device=bench.device)


def _paged(
    bench: Bench, shape: ModelShape, backend: AttentionBackend, kv: KVShard, extents: Extents
) -> Callable[[int], Tensor]:
    query = random_query(bench, shape, extents)
    inputs = build_inputs(lay_out(extents, kv.page_size, kv.num_pages), (), kv.page_size, bench.device)
    spec = AttentionSpec(shape.head_dim**-0.5)
    return lambda layer: backend(query, kv, layer, inputs, spec)


def _dense(bench: Bench, shape: ModelShape, start: int, count: int) -> Callable[[int], Tensor]:
    """Return a function that runs torch's attention of one chunk for a layer, in the fastest case.

    Keys and values are contiguous instead of in pages, and have one head per query head.

    Args:
        start: number of tokens before the chunk.
        count: number of tokens of the chunk.
    """
    size = (1, shape.num_heads, start + count, shape.head_dim)
    keys, values = (
        [torch.randn(size, dtype=bench.dtype, device=bench.device) for _ in range(shape.num_layers)] for _ in range(2)
    )
    query = random_query(bench, shape, [(start, count)]).transpose(0, 1)[None].contiguous()
    mask = causal_lower_right(count, start + count)
    return lambda layer: functional.scaled_dot_product_attention(query, keys[layer], values[layer], attn_mask=mask)


@torch.inference_mode()
def call_of_layers(bench: Bench, num_layers: int, attend: Callable[[int], Tensor]) -> Callable[[], object]:
    """Return a call that computes the attention of all layers. On a GPU, it replays a CUDA graph."""

    def all_layers() -> None:
        for layer in range(num_layers):
            attend(layer)

    if not bench.on_gpu:
        return all_layers
    all_layers()  # kernels cannot be compiled during a capture
    graph = CudaGraph(torch.cuda.graph_pool_handle())
    graph.capture(all_layers)
    return graph.replay


def _of_a_layer(bench: Bench, num_layers: int, attend: Callable[[int], Tensor]) -> Figures:
    (found,) = bench.seconds(call_of_layers(bench, num_layers, attend))
    return {"s": found["s"] / num_layers, "quartiles_s": [one / num_layers for one in found["quartiles_s"]]}


def _compare(bench: Bench, what: str, extents: Extents, shape: ModelShape, taken: Figures) -> None:
    """Compare our Triton kernel with the fastest other kernel, and for decodes also with the rate of reading memory.

    Args:
        what: name of the microbatch.
        taken: times of each backend on it. Results are added to it.
    """
    if "s" not in taken.get("triton", {}):
        return
    own_s = taken["triton"]["s"]
    rivals = {name: taken[name]["s"] for name in _FUSED if name != "triton" and "s" in taken.get(name, {})}
    if all(count == 1 for _, count in extents):
        keys = sum(start + count for start, count in extents)
        read = 2 * shape.num_kv_heads * shape.head_dim * bench.dtype.itemsize * keys
        taken["share_of_bandwidth"] = read / own_s / bench.rates["bytes_per_s"]
    if rivals:
        best = min(rivals, key=rivals.__getitem__)
        bench.check(f"{what}: Triton next to {best}", rivals[best] / own_s, ATTENTION_SHARE)
    else:
        taken["rivals"] = "none is installed"
