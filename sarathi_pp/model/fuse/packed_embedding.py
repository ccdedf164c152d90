"""Embeddings that look tokens up in the packed weight of a tied LM head, so that this weight is in memory once.

    row n of the weight (N, K)  =  packed[n // 16, :, n % 16], read as numbers of the weight's type

A packed weight is (N / 16, lines, 16) 32-bit words. A word has one input of a float32 weight, or two of a 16-bit one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sarathi_pp.model.fuse.float_linear import PANEL, FloatLinear
from sarathi_pp.model.fuse.packed_linear import PackedLinear, packed_class
from sarathi_pp.model.fuse.rewrite import reads_weight
from sarathi_pp.model.narrow_weights import embedding_scale, is_known_embedding


class PackedEmbedding(nn.Module):
    """An embedding over the packed weight of a linear layer: the token ids' rows, times a scale if it has one.

    The rows have the bits of the embedding that it replaces.

    Args:
        linear: the LM head, packed.
        embedding: the embedding of the same weight, whose scale is used.
        compute: float type of the rows.
    """

    def __init__(self, linear: PackedLinear | FloatLinear, embedding: Any, compute: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = linear.out_features, linear.in_features
        self._packed, self._held_type, self._compute = linear.tensors()[0], linear.held_type, compute
        scale = embedding_scale(embedding)
        self._scale = scale.to(compute) if isinstance(scale, Tensor) else scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the (..., embedding_dim) rows of int64 token ids (...), which must be in [0, num_embeddings)."""
        words = self._packed[token_ids // PANEL, :, token_ids % PANEL]
        # torch promises no order of the result in memory, and 16-bit numbers can only be viewed in words of one row.
        rows = words.contiguous().view(self._held_type).to(self._compute)
        return rows if self._scale is None else rows * self._scale


class _Place(NamedTuple):
    parent: nn.Module
    name: str
    child: nn.Module


def pack_tied_heads(module: nn.Module, compute: torch.dtype) -> None:
    """Pack each linear layer that shares its weight with an embedding, and replace the embedding by a PackedEmbedding.

    Both stay as they are if a third module has the weight, if a module around them reads it, or if no class packs the
    layer in panels. oneDNN's layout cannot be read back. Call it after the weights are loaded.

    Args:
        compute: float type of the computation. On CPU, the weight may have a narrower one.
    """
    owners: defaultdict[int, list[_Place]] = defaultdict(list)
    for parent in module.modules():
        for name, child in parent.named_children():
            for parameter in child.parameters(recurse=False):
                owners[id(parameter)].append(_Place(parent, name, child))
    for places in owners.values():
        heads = [place for place in places if type(place.child) is nn.Linear]
        embeddings = [place for place in places if is_known_embedding(place.child)]
        if len(heads) == len(embeddings) == 1 and len(places) == 2:
            _pack_tied(heads[0], embeddings[0], compute)


def _pack_tied(head: _Place, embedding: _Place, compute: torch.dtype) -> None:
    linear = head.child
    assert isinstance(linear, nn.Linear)
    packed = packed_class(linear, compute)
    is_read = reads_weight(head.parent) or reads_weight(embedding.parent)
    if is_read or (packed is not PackedLinear and packed is not FloatLinear):
        return
    made = packed(linear)
    setattr(head.parent, head.name, made)
    setattr(embedding.parent, embedding.name, PackedEmbedding(made, embedding.child, compute))
