"""Cosines and sines of positions, looked up where a model would compute them anew for every microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from sarathi_pp.model.fuse.rewrite import runs

# The same in new releases of transformers; Qwen2's was written differently before.
_KNOWN = (LlamaRotaryEmbedding, Qwen2RotaryEmbedding)
# Kinds in which an angle depends on its position alone, and not on how long the others are.
_STEADY = ("default", "linear", "llama3", "yarn")
# torch computes so many floats at once, and what is left over one by one, which gives other last bits.
_AT_ONCE = 32
# Positions of a step, few enough for one thread: several would each have something left over.
_STEP = 128
_LEAST_STEPS = 32


class Rotation:
    """rotary: transformers' own, whose values are kept. One row for each position up to the last one asked for."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._table = torch.empty(2, 0, 0)

    @staticmethod
    def fits(rotary: Any) -> bool:
        """Whether a row of its table is, to the last bit, what it gives for that position among any others."""
        steady = any(runs(rotary, known) for known in _KNOWN) and rotary.rope_type in _STEADY
        return steady and 2 * rotary.inv_freq.numel() % _AT_ONCE == 0

    def of(self, positions: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (1, T, head_dim) of `like`'s dtype each. positions: (T,) int64 below `end`, on CPU."""
        if self._table.shape[1] < end:
            self._grow(end, like)
        found = self._table.index_select(1, positions)
        return found[:1], found[1:]

    def _grow(self, end: int, like: Tensor) -> None:
        """To twice as many positions, or as many as are needed."""
        begin = self._table.shape[1]
        steps = range(begin, max(end, 2 * begin, _LEAST_STEPS * _STEP), _STEP)
        made = [torch.cat(self._rotary(like, position_ids=torch.arange(at, at + _STEP)[None])) for at in steps]
        self._table = torch.cat([self._table, *made] if begin else made, dim=1)
