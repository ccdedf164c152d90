"""Attention on a CUDA device with a kernel of our own, which needs only torch and the Triton that torch installs.

Chunks and decodes of a microbatch are one launch, and one more if long contexts were split. The host prepares the
kernel's work (attention_work.py) once per microbatch and sliding window, because layers differ only in the window.
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
    """Attention by our own Triton kernel.

    Attributes:
        page_multiple: 16. Keys are read one by one, so smaller pages would work too, but no smaller size is tested.
        default_page_size: 16. For the same reason, large pages gain only a few instructions per block of keys. Small
            pages waste less at a sequence's end.
    """

    name = "triton"
    page_multiple = 16
    default_page_size = 16

    def __init__(self) -> None:
        self._microbatch: _Microbatch | None = None

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """See AttentionBackend. Scores, softmax and sums are float32. Weights are rounded to the values' dtype."""
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
    """Attention for a CUDA graph. See CapturableAttention.

    Args:
        works: the kernel's work for each sliding window of the stage's layers (None: no window).
    """

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
    """A microbatch, and the kernel's work for it, which all layers with the same window share."""

    inputs: StageInputs
    extents: tuple[Extent, ...]
    _work: dict[int | None, AttentionWork] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: StageInputs) -> _Microbatch:
        return cls(inputs, _extents(inputs))

    def work(self, window: int | None, group: int, kv: KVShard) -> AttentionWork:
        """Return the kernel's work for layers with a sliding window of `window` tokens (None: no window).

        The first layer with that window makes it.

        Args:
            group: number of query heads that share a KV head.
        """
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
    """Return the number of streaming multiprocessors of a CUDA device.

    On a CPU it is 1, because Triton's interpreter runs one program after the other.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
