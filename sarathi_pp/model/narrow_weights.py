"""Weights that stay in a narrower float type than that of the computation, such as bfloat16 in a float32 model.

    checkpoint: bfloat16  ->  memory: bfloat16  ->  registers: float32

Every bfloat16 is a float32, so the results are those of a model whose weights were converted when they were loaded. But
they take half the memory, and half the time where a product only waits for memory. Linear layers widen them in their
product (fuse/float_linear.py). Other modules call torch's products, which batch_invariant.py replaces by ours.
Embeddings widen the rows that they look up.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.biogpt.modeling_biogpt import BioGptScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from sarathi_pp.model.fuse.rewrite import runs

# Returns the type in which the weight of this name is stored, if it is narrower; None for the type of the computation.
NarrowType = Callable[[str], torch.dtype | None]


class WideEmbedding(nn.Module):
    """An embedding whose weight has a narrower type: the rows of the token ids in float32, times a scale if it has one.

    It shares its weight with the embedding that it replaces, and so with a tied LM head until that is packed.
    """

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.scale = embedding_scale(embedding)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(token_ids, self.weight).float()
        return rows if self.scale is None else rows * self.scale


def hold_narrow(module: nn.Module, narrow_type: NarrowType) -> None:
    """Give matrices their narrower types. Call it before the weights are loaded.

    Some routers convert their inputs to the type of their weight. Such weights get the type of the computation.
    """
    asked = {one for owner in module.modules() if _asks_for_type(owner) for one in (owner, *owner.children())}
    for path, owner in module.named_modules():
        is_embedding = isinstance(owner, nn.Embedding)
        if not (_is_plain(owner) or _is_scaled(owner)) if is_embedding else owner in asked:
            continue
        for name, parameter in list(owner.named_parameters(recurse=False)):
            dtype = narrow_type(f"{path}.{name}") if parameter.dim() > 1 else None
            if dtype is not None:
                setattr(owner, name, nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False))


def widen_embeddings(module: nn.Module) -> None:
    """Replace embeddings with a narrower weight by those that return float32. Call it after the weights are loaded."""
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Embedding) and child.weight.dtype != torch.float32:
                setattr(owner, name, WideEmbedding(child))


def is_known_embedding(module: nn.Module) -> bool:
    """Return whether a module only returns rows of its weight, times its `embedding_scale`."""
    known = isinstance(module, nn.Embedding) and (_is_plain(module) or _is_scaled(module))
    return known or type(module) is WideEmbedding


def embedding_scale(embedding: Any) -> float | Tensor | None:
    """Return the factor of an embedding's rows, or None if it has none."""
    if type(embedding) is WideEmbedding:
        return embedding.scale
    return embedding.embed_scale if _is_scaled(embedding) else None


def _is_plain(embedding: nn.Module) -> bool:
    return type(embedding).forward is nn.Embedding.forward


def _is_scaled(embedding: nn.Module) -> bool:
    """Return whether an embedding multiplies its rows with embed_scale, a number or a buffer."""
    return any(runs(embedding, known) for known in (Gemma3TextScaledWordEmbedding, BioGptScaledWordEmbedding))


def _asks_for_type(module: nn.Module) -> bool:
    """Return whether a module's forward reads `weight.dtype` of itself or of a child."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    read = [one.argval for one in dis.get_instructions(code)] if code is not None else []
    return ("weight", "dtype") in pairwise(read)
