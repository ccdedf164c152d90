"""Attention on a CUDA device with a kernel of our own, which needs only torch and the Triton it comes with.

Chunks and decodes of a microbatch are one launch, and one more where long contexts were split. What the kernel is to
do is laid out on the host once per microbatch and window: layers differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from sarathi_pp_kernels.triton.attention_work import AttentionWork, Blocks, CapturableWork, Extent, cut_work
from sarathi_pp_kernels.triton.paged_attention import paged_attention
from torch import Tensor

from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard


class TritonAttention:
    """page_multiple 16: keys are read one by one, so that smaller pages would do too, but no size below it is tested.

    default_page_size: for the same reason large pages gain little, a few instructions of a block of keys, and small
    ones waste less at a sequence's end.
    """

    name = "triton"
    page_multiple = 16
    default_page_size = 16

    def __init__(self) -> None:
        self._microbatch: _Microbatch | None = None

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """See AttentionBackend. Scores, softmax and sums are float32; weights are rounded to the values' dtype."""
        if self._microbatch is None or self._microbatch.inputs is not inputs:
            self._microbatch = _Microbatch.of(inputs)
        return paged_attention(
            query,
            kv.keys(layer),
            kv.values(layer),
            inputs.pages,
            self._microbatch.work(spec.sliding_window, query.shape[1] // kv.num_kv_heads, kv),
            scaling=spec.scaling,
            softcap=spec.softcap,
            sinks=spec.sinks,
        )

    def for_capture(
        self, num_tokens: int, num_seqs: int, longest: int, kv: KVShard, num_heads: int, windows: Iterable[int | None]
    ) -> CapturableTritonAttention:
        """See CapturableBackend."""
        blocks = Blocks.of(num_heads // kv.num_kv_heads, kv.head_dim, kv.dtype.itemsize)
        device = kv.keys(kv.layers[0]).device
        processors = _num_processors(device)
        return CapturableTritonAttention(
            {
                window: CapturableWork(
                    num_tokens, num_seqs, longest, blocks, window, kv.num_kv_heads, processors, device
                )
                for window in set(windows)
            }
        )


class CapturableTritonAttention:
    """See CapturableAttention. works: of each sliding window."""

    name = TritonAttention.name
    page_multiple = TritonAttention.page_multiple
    default_page_size = TritonAttention.default_page_size

    def __init__(self, works: Mapping[int | None, CapturableWork]) -> None:
        self._works = works

    def load(self, inputs: StageInputs) -> None:
        """See CapturableAttention. The page tables of `inputs` are at the address that the graph reads."""
        extents = _extents(inputs)
        for work in self._works.values():
            work.load(extents)

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        return paged_attention(
            query,
            kv.keys(layer),
            kv.values(layer),
            inputs.pages,
            self._works[spec.sliding_window].work,
            scaling=spec.scaling,
            softcap=spec.softcap,
            sinks=spec.sinks,
        )


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """What all layers of a microbatch read."""

    inputs: StageInputs
    extents: tuple[Extent, ...]
    _work: dict[int | None, AttentionWork] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: StageInputs) -> _Microbatch:
        return cls(inputs, _extents(inputs))

    def work(self, window: int | None, group: int, kv: KVShard) -> AttentionWork:
        """Cut when the first layer with such a window asks."""
        if window not in self._work:
            blocks = Blocks.of(group, kv.head_dim, kv.dtype.itemsize)
            device = self.inputs.pages.device
            self._work[window] = cut_work(
                self.extents, blocks, window, kv.num_kv_heads, _num_processors(device), device
            )
        return self._work[window]


def _extents(inputs: StageInputs) -> tuple[Extent, ...]:
    return tuple(Extent(span.first_row, span.num_tokens, span.start, span.first_page) for span in inputs.spans)


def _num_processors(device: torch.device) -> int:
    """Of a CUDA device; 1 of a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
