"""The cache of one stage's layers: keys and values of all tokens so far, in pages, and the states of sequences.

Each attention layer has one tensor of keys and one of values. Within a page, heads come before tokens:

    (num_pages, num_kv_heads, page_size, head_dim)
     page       head          token      channel

So the page_size keys of one head are one contiguous block. Attention multiplies a head's queries with that head's keys.
With tokens before heads, each product would stride over the other heads, which on CPU takes four times as long for a
decode. Gathering a sequence's pages copies whole blocks.

A layer with a state (layer_cache.py) has one tensor per kind of state, and a sequence's state is one entry of it:

    (num_slots, rows, channels)            latest inputs of a convolution
    (num_slots, blocks, rows, columns)     recurrent state, float32

Keys and values may be stored in FP8, one byte each. They are rounded before attention reads them, those of a
microbatch's own rows too. So a row sees the same keys and values however its prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache, StateCache, token_values
from sarathi_pp.model.inputs import StageInputs

_FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = 448.0


def page_dtype(kv_cache_dtype: str, compute: torch.dtype) -> torch.dtype:
    """Return the float type of keys and values in pages.

    Args:
        kv_cache_dtype: that of a RunConfig or of a ResolvedRun.
        compute: float type of the computation.
    """
    return _FLOAT8 if kv_cache_dtype == "fp8" else compute


def page_bytes(caches: Sequence[LayerCache], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one page of `page_size` tokens takes in these layers.

    Args:
        dtype: float type of keys and values.
    """
    return page_size * token_values(caches) * dtype.itemsize


def to_float8(x: Tensor) -> Tensor:
    """Round to float8_e4m3fn: to the nearest value, and to the even one of two.

    Finite values beyond 448 become 448. Infinity becomes NaN, so that logits show an overflow. Signs are kept.
    """
    bounded = x.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)  # of values beyond, some versions of torch make NaN
    return bounded.masked_fill(x.isinf(), torch.nan).copysign(x).to(_FLOAT8)


def as_indexable(pages: Tensor) -> Tensor:
    """Return pages that torch can index: those in FP8 as bytes. Not every torch and device can index FP8."""
    return pages.view(torch.uint8) if pages.dtype == _FLOAT8 else pages


class RowTarget(NamedTuple):
    """Memory for the keys and values of a microbatch's T rows, in the float type of the computation.

    Attributes:
        keys: (num_pages, num_kv_heads, page_size, head_dim).
        values: like keys.
        pages: (T,) int64, index of the page to which each row's key and value are written.
        offsets: (T,) int64, index of the row's token within that page.
    """

    keys: Tensor
    values: Tensor
    pages: Tensor
    offsets: Tensor


class KVShard:
    """The KV pages and the states of the layers [first, end). Layer indices count over the whole model, from 0.

    The coordinator, which plans the microbatches, decides which sequence has which page and which state slot.

    The tensors are not initialised. So a large KV cache takes no resident memory until pages are written. Memory that
    was not written may hold NaN. Readers slice to the keys that a sequence has, because a masked weight of 0 times NaN
    is NaN. A sequence's first row does not read its slot, so a state that another sequence left there does not matter.

    Attributes:
        num_kv_heads: KV heads of the model's attention layers, which are all alike; 0 if the model has none.
        head_dim: channels of a key.
        value_dim: channels of a value.
        latent: values are a part of the keys. See PagedCache.
        dtype: float type of the computation.
        float8: keys and values are stored in FP8.

    Args:
        layers: (first, end).
        num_pages: number of pages, with ids from 0.
        page_size: tokens per page.
        caches: caches of all layers of the model, those of other stages included.
        pages: float type of keys and values, dtype or float8_e4m3fn; None for dtype.
        num_slots: number of state slots, with ids from 0.
        spare: add one page with the id num_pages. The padding rows of a CUDA graph write their keys and values there.
    """

    def __init__(
        self,
        layers: tuple[int, int],
        num_pages: int,
        page_size: int,
        caches: Sequence[LayerCache],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pages: torch.dtype | None = None,
        num_slots: int = 0,
        spare: bool = False,
    ) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.page_size = page_size
        self._paged = next((cache for cache in caches if isinstance(cache, PagedCache)), PagedCache(0, 0, 0))
        self.num_kv_heads, self.head_dim = self._paged.num_heads, self._paged.key_dim
        self.value_dim, self.latent = self._paged.value_dim, self._paged.latent
        self.dtype = dtype
        self.float8 = pages == _FLOAT8
        self.device = device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}
        for layer in range(*layers):
            cache = caches[layer]
            if isinstance(cache, StateCache):
                self._conv[layer] = torch.empty((num_slots, *cache.conv), dtype=dtype, device=device)
                if cache.recurrent:
                    blocks = (num_slots, *cache.recurrent)
                    self._recurrent[layer] = torch.empty(blocks, dtype=torch.float32, device=device)
                continue
            shape, stored = (num_pages + spare, cache.num_heads, page_size), pages or dtype
            keys = torch.empty((*shape, cache.key_dim), dtype=stored, device=device)
            self._keys[layer] = keys
            self._values[layer] = (
                keys[..., : cache.value_dim]
                if cache.latent
                else torch.empty((*shape, cache.value_dim), dtype=stored, device=device)
            )

    def keys(self, layer: int) -> Tensor:
        """Return the key pages of a layer, (num_pages, num_kv_heads, page_size, key_dim). `layer` counts from 0."""
        return self._of(self._keys, layer)

    def values(self, layer: int) -> Tensor:
        """Return the value pages of a layer, (num_pages, num_kv_heads, page_size, value_dim).

        Those of latent attention are a part of the keys, so they are not contiguous.
        """
        return self._of(self._values, layer)

    def conv_state(self, layer: int) -> Tensor:
        """Return the latest inputs of a layer's convolution, (num_slots, rows, channels)."""
        return self._of(self._conv, layer)

    def recurrent_state(self, layer: int) -> Tensor:
        """Return the recurrent states of a layer, (num_slots, blocks, rows, columns) float32."""
        return self._of(self._recurrent, layer)

    def write(self, layer: int, key: Tensor, value: Tensor, inputs: StageInputs) -> None:
        """Write keys and values, each (T, num_kv_heads, channels), to the pages and offsets that `inputs` names."""
        self._put(self.keys(layer), key, inputs)
        self._put(self.values(layer), value, inputs)

    def write_latent(self, layer: int, latent: Tensor, inputs: StageInputs) -> None:
        """Write the rows' latents, (T, 1, key_dim), to the pages and offsets that `inputs` names."""
        self._put(self.keys(layer), latent, inputs)

    def row_target(self, layer: int, inputs: StageInputs) -> RowTarget:
        """Return the memory to which a kernel writes the rows' keys and values. Call `store_rows` afterwards.

        It is the pages themselves, or in FP8 a new page with a place for each row.
        """
        keys, values = self.keys(layer), self.values(layer)
        if not self.float8:
            return RowTarget(keys, values, inputs.write_pages, inputs.write_offsets)
        count = inputs.num_tokens
        heads = torch.empty((2, 1, self.num_kv_heads, count, self.head_dim), dtype=self.dtype, device=self.device)
        return RowTarget(
            heads[0],
            heads[1],
            torch.zeros_like(inputs.write_pages),
            torch.arange(count, dtype=torch.int64, device=self.device),
        )

    def store_rows(self, layer: int, target: RowTarget, inputs: StageInputs) -> None:
        """Write what a kernel wrote to a `row_target` to the pages, unless it is there already."""
        if self.float8:
            self.write(layer, target.keys[0].transpose(0, 1), target.values[0].transpose(0, 1), inputs)

    def room_for_copies(self, num_pages: int) -> KVShard:
        """Return a shard of one layer for copies of some pages, in the float type of the computation. Copy nothing."""
        return KVShard((0, 1), num_pages, self.page_size, [self._paged], self.dtype, self.device)

    def _put(self, pages: Tensor, rows: Tensor, inputs: StageInputs) -> None:
        written = as_indexable(to_float8(rows)) if self.float8 else rows
        as_indexable(pages)[inputs.write_pages, :, inputs.write_offsets] = written

    def _of(self, tensors: dict[int, Tensor], layer: int) -> Tensor:
        first, end = self.layers
        assert first <= layer < end, f"layer {layer} is not one of this stage's [{first}, {end})"
        return tensors[layer]
