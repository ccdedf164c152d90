"""One stage with random weights on a device, and its microbatches. It needs no checkpoint and no pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention import CapturableBackend, Needs, choose_backend
from sarathi_pp.model.attention.adapter import PAGED
from sarathi_pp.model.fuse.bare_model import bare_lm_head, use_bare_model
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.graphs import CudaGraph, Shape, StageGraphs
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.memory import give_back
from sarathi_pp.model.stage_model import StageModel

# For each sequence of a microbatch: (number of its earlier tokens, number of its tokens in the microbatch).
Extents = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model with the Llama architecture."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def layer_weights(self) -> int:
        """Number of weights in the linear layers of all layers. The LM head is not included."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def flops(self, extents: Extents, num_logits: int) -> float:
        """Return the floating-point operations of a microbatch: products with weights, and attention.

        Args:
            num_logits: rows that go through the LM head.
        """
        tokens = sum(count for _, count in extents)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in extents)
        linear = 2 * self.layer_weights * tokens + 2 * self.hidden_size * self.vocab_size * num_logits
        return linear + 4.0 * self.num_layers * self.num_heads * self.head_dim * pairs

    def read_bytes(self, extents: Extents, itemsize: int) -> int:
        """Return the bytes that a microbatch of decodes reads: each weight once, and the keys and values it sees.

        Args:
            itemsize: bytes per number.
        """
        weights = self.layer_weights + self.hidden_size * self.vocab_size
        keys = sum(start + count for start, count in extents)
        return itemsize * (weights + 2 * self.num_layers * self.num_kv_heads * self.head_dim * keys)

    def config(self, **more: Any) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=8192,
            **more,
        )


LLAMA_3_8B = ModelShape(4096, 14336, 32, 32, 8, 128256)


class GpuStage:
    """All layers of a model as one stage, with KV pages full of random numbers.

    Args:
        num_tokens: number of tokens that the KV pages hold.
        attention: name of an attention backend.
        weights: weights by their names in transformers; None for random weights of seed 0.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int,
        attention: str = "auto",
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.shape = shape
        self.device = device
        needs = Needs(dtype, shape.head_dim, softcap=False, sinks=False)
        backend = choose_backend(attention, device, None, needs)
        self.page_size = backend.default_page_size
        module = random_model(shape, dtype, device, PAGED)
        if weights is not None:
            module.load_state_dict(weights)
        module.requires_grad_(False)
        fuse(module)
        use_bare_model(module, "model")
        if device.type == "cuda":
            give_back()  # memory of weights that fuse() has merged
        layers, count = (0, shape.num_layers), shape.num_layers
        self.model = StageModel(module, layers, count, (None,) * count, backend, 0, 0, bare_lm_head(module, "lm_head"))
        num_pages = -(-num_tokens // self.page_size)
        self.kv = filled_shard(shape, num_pages, self.page_size, dtype, device)

    def microbatch(self, extents: Extents) -> Callable[[], Tensor]:
        """Return a function that computes a microbatch without a graph. It returns the logits after each sequence."""
        spans, rows, ids = self._laid_out(extents)
        inputs = build_inputs(spans, rows, self.page_size, self.device)
        x = torch.tensor(ids, device=self.device)
        return lambda: self.model.forward(x, inputs, self.kv)

    @property
    def has_graphs(self) -> bool:
        return self.device.type == "cuda" and isinstance(self.model.backend, CapturableBackend)

    def captured(self, extents: Extents) -> Callable[[], Tensor]:
        """Return a function that computes a microbatch by a CUDA graph of exactly its number of tokens and sequences.

        In a pipeline, microbatches whose size has a graph run in the same way.
        """
        spans, rows, ids = self._laid_out(extents)
        shape = Shape(len(ids), len(spans), decodes=len(ids) == len(spans))
        graphs = StageGraphs(
            self.model,
            self.kv,
            [shape],
            self.shape.hidden_size,
            self.shape.num_heads,
            self.device,
            [CudaGraph(torch.cuda.graph_pool_handle())],
        )
        compute = graphs.prepare(spans, rows, ids)
        assert compute is not None, "the graph was captured for this shape"
        return lambda: compute(None)

    def _laid_out(self, extents: Extents) -> tuple[list[Span], list[int], list[int]]:
        spans = lay_out(extents, self.page_size, self.kv.num_pages)
        rows, ids = [], []
        for span in spans:
            ids += synthetic_tokens(span.start, span.num_tokens, self.shape.vocab_size)
            rows.append(len(ids) - 1)
        return spans, rows, ids


def synthetic_tokens(start: int, count: int, vocab_size: int) -> list[int]:
    return [(7 * place + 3) % vocab_size for place in range(start, start + count)]


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device, attention: str = "sdpa") -> Any:
    """Return transformers' own model with random weights of seed 0."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attention)
    return module.eval()


def filled_shard(
    shape: ModelShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVShard:
    layers = (0, shape.num_layers)
    caches = plain_caches(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    kv = KVShard(layers, num_pages, page_size, caches, dtype, device, spare=True)
    for layer in range(*layers):
        kv.keys(layer).normal_()
        kv.values(layer).normal_()
    return kv


def lay_out(extents: Extents, page_size: int, num_pages: int) -> list[Span]:
    """Return a Span for each sequence, with KV pages of its own. Pages are given out one after another, from page 0."""
    spans, first_page = [], 0
    for start, count in extents:
        end_page = first_page + -(-(start + count) // page_size)
        assert end_page <= num_pages, f"{extents} do not fit {num_pages} pages"
        spans.append(Span(start, count, range(first_page, end_page)))
        first_page = end_page
    return spans
