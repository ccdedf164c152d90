"""The ranks that hold one stage together (tensor parallelism), and the sum of their partial results.

They need it after every matrix product that is split among them.
"""

from __future__ import annotations

import torch

from sarathi_pp.wire.channel import Clock
from sarathi_pp.wire.group import Group
from sarathi_pp.wire.torch_channel import peer_lost


class ShardGroup:
    """This rank's end of the group of ranks that hold a stage. All of them make the same calls in the same order.

    Args:
        index: index of this rank among the ranks of the stage, from 0.
        size: number of ranks of the stage.
        others: names of the other ranks, for messages to the user.
        group: a communicator of these ranks. Its timeout is the time for which a rank may be silent.

    Attributes:
        spent_s: seconds that this rank has spent in sums so far, including the wait for the other ranks.
    """

    def __init__(self, index: int, size: int, others: tuple[str, ...], group: Group, clock: Clock) -> None:
        self.index = index
        self.size = size
        self.spent_s = 0.0
        self._others = others
        self._group = group
        self._clock = clock

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the ranks of the stage, with the same bits on each rank. It may overwrite x.

        On a CPU, the bits of a row do not depend on the other rows. gloo's own sum would break this for three or more
        ranks, because its order of addition depends on the position in the tensor. So these ranks exchange their parts,
        and each rank adds them in the order of ranks.

        Raises:
            PeerLostError: another rank of the stage is lost.
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
