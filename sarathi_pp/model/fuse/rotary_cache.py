"""A cache of the rotary embedding's cosines and sines, which a model would compute again for every microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from sarathi_pp.model.fuse.rewrite import runs

# New releases of transformers have the same code in both. In older ones, Qwen2's is different.
_KNOWN = (LlamaRotaryEmbedding, Qwen2RotaryEmbedding)
# Rope types in which an angle depends on its position alone, and not on the longest sequence.
_OF_POSITION_ALONE = ("default", "linear", "llama3", "yarn")
# Number of floats that torch computes at once. It computes a remainder one by one, which gives other last bits.
_AT_ONCE = 32
# Positions per step, few enough for one thread. With several threads, each would have a remainder.
_STEP = 128
_LEAST_STEPS = 32


class RotaryCache:
    """Cosines and sines of all positions up to the largest one that was requested.

    Args:
        rotary: transformers' own module, which computes them.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._table = torch.empty(2, 0, 0)

    @staticmethod
    def fits(rotary: Any) -> bool:
        """Return whether the module gives a position the same bits whatever other positions are computed with it."""
        known = any(runs(rotary, kind) for kind in _KNOWN) and rotary.rope_type in _OF_POSITION_ALONE
        return known and 2 * rotary.inv_freq.numel() % _AT_ONCE == 0

    def of(self, positions: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (1, T, head_dim) each, in the dtype of `like`.

        Args:
            positions: (T,) int64 on CPU.
            end: a number above all positions.
        """
        if self._table.shape[1] < end:
            self._grow(end, like)
        rows = self._table.index_select(1, positions)
        return rows[:1], rows[1:]

    def _grow(self, end: int, like: Tensor) -> None:
        """Double the number of cached positions, or reach `end` if that is more."""
        begin = self._table.shape[1]
        steps = range(begin, max(end, 2 * begin, _LEAST_STEPS * _STEP), _STEP)
        made = [torch.cat(self._rotary(like, position_ids=torch.arange(at, at + _STEP)[None])) for at in steps]
        self._table = torch.cat([self._table, *made] if begin else made, dim=1)
