"""The ids of the tokens that the latest microbatch drew, on the device that drew them.

The next microbatch may have decodes of these tokens, issued before the host knows the ids (Limits.issues_ahead):

    microbatch k -> ids on the device -> token ids of microbatch k+1 -> layers
                         `-> copy in host memory -> result of microbatch k
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sarathi_pp.errors import ProtocolError


class LatestDraw:
    """The drawn ids of the latest microbatch, which replace the codes that stand for them in the next one."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = torch.empty(0, dtype=torch.int64)

    def put(self, sequences: Iterable[int], ids: Tensor) -> None:
        """Keep the ids that a microbatch drew.

        Args:
            sequences: their sequences, in the same order.
            ids: (n,) int64 on the device. Those of failed draws have no meaning, and may be negative.
        """
        self._places = {sequence: place for place, sequence in enumerate(sequences)}
        self._ids = ids.clamp(min=0)

    def code(self, sequence: int) -> int:
        """Return the negative number that stands for the token that the latest microbatch drew for a sequence.

        Raises:
            ProtocolError: it drew none for the sequence.
        """
        place = self._places.get(sequence)
        if place is None:
            raise ProtocolError(f"a decode of sequence {sequence} has no token id, and the stage drew none for it last")
        return -1 - place

    def fill(self, token_ids: Tensor) -> Tensor:
        """Return token ids with the drawn ids in place of their codes, without waiting for the device.

        Args:
            token_ids: (T,) int64 on the device of the drawn ids, at least one of them a code.
        """
        places = (-1 - token_ids).clamp(min=0)
        return torch.where(token_ids < 0, self._ids[places], token_ids)
