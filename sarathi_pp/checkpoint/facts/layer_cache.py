"""The kinds of memory that layers keep of a sequence's earlier tokens. Imports no torch.

    PagedCache   one vector per token and head, in KV pages: attention. It grows with the sequence.
    StateCache   one state per sequence, in a state slot: linear attention and convolutions. Its size is fixed.

A pipeline's pages and slots have the same ids on every stage. Each stage stores its own layers' part of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The keys and values of one attention layer.

    Attributes:
        num_heads: KV heads.
        key_dim: channels of a key.
        value_dim: channels of a value.
        latent: the values are the first value_dim channels of the keys, so they are not stored. Multi-head latent
            attention (MLA) keeps one such vector per token for all its heads.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def token_values(self) -> int:
        """Number of values that the layer stores per token."""
        return self.num_heads * (self.key_dim if self.latent else self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateCache:
    """The state of one layer whose memory of earlier tokens does not grow.

    Attributes:
        conv: (rows, channels), the latest inputs of the layer's convolution.
        recurrent: (blocks, rows, columns) of the recurrent state, in float32. The state of a head has one block, or
            several blocks of 16 columns that follow each other. Empty if the layer is a convolution alone.
    """

    conv: tuple[int, int]
    recurrent: tuple[int, ...] = ()

    def num_bytes(self, item_bytes: int) -> int:
        """Return the bytes of one sequence's state.

        Args:
            item_bytes: bytes of a number of the computation. The inputs of the convolution have its type.
        """
        recurrent = 4 * math.prod(self.recurrent) if self.recurrent else 0
        return math.prod(self.conv) * item_bytes + recurrent


LayerCache = PagedCache | StateCache


def token_values(caches: Sequence[LayerCache]) -> int:
    """Return the number of values that these layers store per token, all in pages."""
    return sum(cache.token_values for cache in caches if isinstance(cache, PagedCache))


def state_bytes(caches: Sequence[LayerCache], item_bytes: int) -> int:
    """Return the bytes of one sequence's states in these layers. See `StateCache.num_bytes`."""
    return sum(cache.num_bytes(item_bytes) for cache in caches if isinstance(cache, StateCache))


def plain_caches(num_layers: int, num_heads: int, head_dim: int) -> tuple[PagedCache, ...]:
    """Return the caches of layers whose keys and values have the same number of channels."""
    return (PagedCache(num_heads, head_dim, head_dim),) * num_layers
