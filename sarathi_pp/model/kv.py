"""The KV cache of one stage's layers: keys and values of all tokens so far, in pages.

Each layer has one tensor of keys and one of values. Within a page, heads come before tokens:

    (num_pages, num_kv_heads, page_size, head_dim)
     page       head          token      channel

So the page_size keys of one head are one contiguous block. Attention multiplies a head's queries with that head's keys.
With tokens before heads, each product would stride over the other heads, which on CPU takes four times as long for a
decode. Gathering a sequence's pages copies whole blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sarathi_pp.model.inputs import StageInputs


def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that one page takes in `num_layers` layers: keys and values of `page_size` tokens."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


class KVShard:
    """The KV pages of the layers [first, end). Layer indices count over the whole model, from 0.

    The coordinator, which plans the microbatches, decides which sequence has which page.

    The tensors are not initialised. So a large KV cache takes no resident memory until pages are written. Memory that
    was not written may hold NaN. Readers slice to the keys that a sequence has, because a masked weight of 0 times NaN
    is NaN.

    Args:
        layers: (first, end).
        num_pages: number of pages, with ids from 0.
        page_size: tokens per page.
        spare: add one page with the id num_pages. The padding rows of a CUDA graph write their keys and values there.
    """

    def __init__(
        self,
        layers: tuple[int, int],
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        spare: bool = False,
    ) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_pages + spare, num_kv_heads, page_size, head_dim)
        first, end = layers
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(first, end)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(first, end)]

    def keys(self, layer: int) -> Tensor:
        """Return the key pages of a layer, (num_pages, num_kv_heads, page_size, head_dim). `layer` counts from 0."""
        return self._keys[self._local(layer)]

    def values(self, layer: int) -> Tensor:
        """Return the value pages of a layer, in the same shape as the keys."""
        return self._values[self._local(layer)]

    def write(self, layer: int, key: Tensor, value: Tensor, inputs: StageInputs) -> None:
        """Write keys and values, each (T, num_kv_heads, head_dim), to the pages and offsets that `inputs` names."""
        local = self._local(layer)
        self._keys[local][inputs.write_pages, :, inputs.write_offsets] = key
        self._values[local][inputs.write_pages, :, inputs.write_offsets] = value

    def _local(self, layer: int) -> int:
        first, end = self.layers
        assert first <= layer < end, f"layer {layer} is not one of this stage's [{first}, {end})"
        return layer - first
