"""One rank of pipelines whose activations use NCCL channels, on CPU. Arguments are those of families_worker.

The channels are the real ones with two changes: their backend is gloo, and each operation on their stream is done when
its call returns.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from sarathi_pp.distributed.transport import NcclOptions, Transport
from sarathi_pp.run import setup
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.timer import HostTimer
from sarathi_pp.wire import nccl_channel
from sarathi_pp.wire.channel import Landing
from tests.commands import families_worker


class HostStream:
    def __init__(self, clock: Clock) -> None:
        self._timer = HostTimer(clock)

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after_computing(self) -> None: ...

    def mark(self) -> Landing:
        return self._timer.mark()

    def before_computing(self, mark: Landing) -> None: ...


def counted(transfer):
    """Count the rows that pass the channel, because a run that does not use it gives the same answers."""

    def do(self, rows: torch.Tensor) -> object:
        counts[transfer.__name__] += len(rows)
        return transfer(self, rows)

    return do


counts = {"send": 0, "receive": 0}

if __name__ == "__main__":
    nccl_channel.NcclChannel.send, nccl_channel.NcclChannel.receive = (
        counted(nccl_channel.NcclChannel.send),
        counted(nccl_channel.NcclChannel.receive),
    )  # type: ignore[method-assign]
    setup.choose_transport = lambda devices, wish: Transport("nccl", "the test says so")
    setup.nccl_options = lambda device, clock: NcclOptions("gloo", device, lambda: HostStream(clock))
    families_worker.main(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"by channel: {counts['send']} sent, {counts['receive']} received", file=sys.stderr)
