"""Experts' weights in MXFP4 that stay as they are stored: how they are read, and the memory that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sarathi_pp.checkpoint.quantised.coded import CodedTensor
from sarathi_pp.checkpoint.tensor_file import read_box


@dataclass(frozen=True, slots=True)
class Mxfp4Codes:
    """Matrices of 4-bit floats with the exponents of their groups. See sarathi_pp_kernels.triton.expand_mxfp4.

    Attributes:
        codes: (n, outputs, inputs / 2) uint8, two codes each, the first one in the lower half.
        scales: (n, outputs, inputs / 32) uint8, exponents of 2 that are biased by 127.
    """

    codes: Tensor
    scales: Tensor


class Mxfp4Tensor(CodedTensor):
    """A weight of all experts of a layer that stays in MXFP4: (experts, inputs, outputs)."""

    def num_bytes(self) -> int:
        """Return the bytes of codes and scales in memory."""
        return math.prod(self.shape) // 2 + math.prod(self.shape) // self._entry.block[1]

    def read_codes(self, expert: int) -> Mxfp4Codes:
        """Return the matrix of one expert as it is stored, in host memory."""
        assert self._cut is None, "no shards of these are proven"
        _, inputs, outputs = self.shape
        rows = expert * outputs, (expert + 1) * outputs
        num_bytes, groups = inputs // 2, inputs // self._entry.block[1]
        return Mxfp4Codes(
            read_box(self._entry.codes, num_bytes, rows, (0, num_bytes), self._count)[None],
            read_box(self._entry.scales, groups, rows, (0, groups), self._count)[None],
        )
