"""Rotary embeddings of the type longrope, with the short or the long factors for each row.

transformers rotates a whole batch with the long factors if the longest sequence of the batch is longer than the model's
original length. So a sequence would depend on those it is batched with. Here each row of a microbatch has the factors
of its own sequence: the short ones up to the original length, and then the long ones for all its tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sarathi_pp.model.inputs import LONG_FACTORS


class LongRotary(nn.Module):
    """A replacement for transformers' rotary embedding of the type longrope.

    Args:
        rotary: transformers' module, which has the short factors before its first call.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        after = rotary.config.rope_parameters["original_max_position_embeddings"]
        self._short, self._long = rotary, copy.deepcopy(rotary)
        self._long(rotary.inv_freq, position_ids=torch.full((1, 1), after, device=rotary.inv_freq.device))
        for fixed in (self._short, self._long):
            fixed.rope_type = "default"  # transformers never changes the factors of this type

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines, (1, T, rotary dimension) each, in the dtype of `x`.

        Args:
            position_ids: (1, T) int64, see StageInputs.
        """
        is_long = position_ids >= LONG_FACTORS
        positions = position_ids % LONG_FACTORS
        cos, sin = self._short(x, position_ids=positions)
        if positions.device.type == "cpu" and not is_long.any():  # on a GPU, the program would wait for the answer
            return cos, sin
        long_cos, long_sin = self._long(x, position_ids=positions)
        chosen = is_long[..., None]
        return torch.where(chosen, long_cos, cos), torch.where(chosen, long_sin, sin)


def use_long_rotary(base: Any) -> None:
    """Replace the rotary embedding of a base model by a LongRotary, if its type is longrope."""
    rotary = getattr(base, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "longrope":
        base.rotary_emb = LongRotary(rotary)
