"""The ranks that hold one stage together, and the sum that they need after every product that is split among them."""

from __future__ import annotations

import torch

from sarathi_pp.wire.channel import Clock
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.torch_channel import peer_lost


class ShardGroup:
    """This rank's part in its stage: shard `index` of `size`. All shards make the same calls in the same order.

    Args:
        others: names of the other ranks, for messages to the user.
        group: a communicator of all shards, whose timeout is how long one may be silent.

    Attributes:
        spent_s: seconds that this rank has spent in sums, including the wait for the others.
    """

    def __init__(self, index: int, size: int, others: tuple[str, ...], group: Group, clock: Clock) -> None:
        self.index = index
        self.size = size
        self.spent_s = 0.0
        self._others = others
        self._group = group
        self._clock = clock

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every shard's x: the same bits on all. Raises PeerLostError.

        On CPU the result of a row depends on that row alone. gloo's own sum of three or more adds them in an order that
        depends on the position in the tensor. So it is not used for these.
        """
        begin_s = self._clock.now()
        in_order = self.size > 2 and x.device.type == "cpu"
        parts: list[torch.Tensor] = []
        try:
            if in_order:
                parts = self._group.all_gather(x.contiguous())
            else:
                self._group.all_reduce(x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise peer_lost(" or ".join(self._others), error) from error
        if in_order:
            x = parts[0]
            for part in parts[1:]:
                x += part
        self.spent_s += self._clock.now() - begin_s
        return x
