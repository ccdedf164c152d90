"""The ranks that hold one stage together, and the sum that they need after every product that is split among them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from sarathi_pp.errors import PeerLostError


class ShardGroup:
    """This rank's part in it: shard `index` of `size`. All of them call alike, in the same order.

    others: names of the other ranks, for messages. group: a communicator of all of them, whose timeout is how long one
    may be silent. spent_s: seconds that this rank has spent in sums, waiting for the others included.
    """

    def __init__(
        self, index: int, size: int, others: tuple[str, ...], group: dist.ProcessGroup, now: Callable[[], float]
    ) -> None:
        self.index = index
        self.size = size
        self.spent_s = 0.0
        self._others = others
        self._group = group
        self._now = now

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every shard's x, in its place: the same bits on all. Raises PeerLostError."""
        begin_s = self._now()
        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            silent = "timed out" in str(error).lower()
            what = (
                "has been silent for longer than --peer-timeout" if silent else "closed its connection: it died or left"
            )
            raise PeerLostError(f"{' or '.join(self._others)} {what}") from error
        self.spent_s += self._now() - begin_s
        return x
