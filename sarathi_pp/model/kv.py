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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache, StateCache, token_values
from sarathi_pp.model.inputs import StageInputs


def page_bytes(caches: Sequence[LayerCache], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one page of `page_size` tokens takes in these layers."""
    return page_size * token_values(caches) * dtype.itemsize


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

    Args:
        layers: (first, end).
        num_pages: number of pages, with ids from 0.
        page_size: tokens per page.
        caches: caches of all layers of the model, those of other stages included.
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
        num_slots: int = 0,
        spare: bool = False,
    ) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.page_size = page_size
        paged = next((cache for cache in caches if isinstance(cache, PagedCache)), PagedCache(0, 0, 0))
        self.num_kv_heads, self.head_dim, self.value_dim = paged.num_heads, paged.key_dim, paged.value_dim
        self.latent = paged.latent
        self.dtype = dtype
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
                    shape = (num_slots, *cache.recurrent)
                    self._recurrent[layer] = torch.empty(shape, dtype=torch.float32, device=device)
                continue
            pages = (num_pages + spare, cache.num_heads, page_size)
            keys = torch.empty((*pages, cache.key_dim), dtype=dtype, device=device)
            self._keys[layer] = keys
            self._values[layer] = (
                keys[..., : cache.value_dim]
                if cache.latent
                else torch.empty((*pages, cache.value_dim), dtype=dtype, device=device)
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
        self.keys(layer)[inputs.write_pages, :, inputs.write_offsets] = key
        self.values(layer)[inputs.write_pages, :, inputs.write_offsets] = value

    def write_latent(self, layer: int, latent: Tensor, inputs: StageInputs) -> None:
        """Write the rows' latents, (T, 1, key_dim), to the pages and offsets that `inputs` names."""
        self.keys(layer)[inputs.write_pages, :, inputs.write_offsets] = latent

    def _of(self, tensors: dict[int, Tensor], layer: int) -> Tensor:
        first, end = self.layers
        assert first <= layer < end, f"layer {layer} is not one of this stage's [{first}, {end})"
        return tensors[layer]
