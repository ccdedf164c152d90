"""The source and the sink of the engine of a replica other than replica 0.

Its requests come from rank 0, and its answers go back to rank 0. Only the replica's leader (its first rank) has them.
One thread, the engine's, uses both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from sarathi_pp.core.request import Completion
from sarathi_pp.engine.messages import Abort, RequestError, Result, Stop, Submit, decode, encode
from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import ProtocolError, RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.process.signals import Asked
from sarathi_pp.trace.clock import Clock
from sarathi_pp.wire.byte_stream import ByteStreamReceiver, ByteStreamSender


class AbortedError(Exception):
    """The end of the engine's run, because rank 0 sent Abort: it wants no answer to its requests so far."""


class RemoteSource:
    """A source of the requests that rank 0 sends. See Source. It also shows whether rank 0 stops the run.

    Args:
        incoming: stream of messages from rank 0.
        offset_s: seconds between both clocks: rank 0's time = this rank's time + offset_s.
    """

    def __init__(self, incoming: ByteStreamReceiver, clock: Clock, offset_s: float) -> None:
        self._incoming = incoming
        self._clock = clock
        self._offset_s = offset_s
        self._rows: deque[Row] = deque()
        self._asked: Asked | None = None
        self._aborted = False

    @property
    def exhausted(self) -> bool:
        """Return whether no request is left and none will come.

        None will come if rank 0 has closed the stream, or if a signal stops the run.
        """
        return not self._rows and (self._incoming.ended or self._asked is not None)

    def take(self, limit: int) -> list[Row]:
        self._read(0)
        if self._aborted:  # later requests are for the engine's next run
            return []
        return [self._rows.popleft() for _ in range(min(limit, len(self._rows)))]

    def wait(self, timeout_s: float | None) -> None:
        if not self._rows:
            self._read(timeout_s)

    def close(self) -> None:
        self._rows.clear()

    def asked(self) -> Asked | None:
        """Return the signal that stops the run; None if rank 0 has sent none.

        Raises:
            AbortedError: rank 0 has sent Abort. Each Abort is raised once.
        """
        self._read(0)
        if self._aborted:
            self._aborted = False
            raise AbortedError
        return self._asked

    def _read(self, timeout_s: float | None) -> None:
        """Handle all messages that have come from rank 0. If none has, wait up to timeout_s for the first one."""
        while (text := self._incoming.read(timeout_s)) is not None:
            timeout_s = 0
            match decode(text):
                case Submit(request) if self._asked is None:
                    request = replace(request, arrival_s=request.arrival_s - self._offset_s)
                    self._rows.append(
                        Row(request.index + 1, request.index, "own", request, arrival_s=request.arrival_s)
                    )
                case Stop(number, left_s):
                    now_s = self._clock.now()
                    self._asked = Asked(number, now_s, math.inf if left_s is None else now_s + left_s)
                case Abort():
                    self._rows.clear()
                    self._aborted = True
                case Submit():
                    pass  # no request starts after a Stop
                case other:
                    raise ProtocolError(
                        f"rank 0 sent a message of kind {type(other).__name__}, which only other leaders may send"
                    )


class RemoteSink:
    """A sink that sends answers and progress to rank 0. See Sink."""

    def __init__(self, outgoing: ByteStreamSender) -> None:
        self._outgoing = outgoing

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        self._outgoing.write(encode(Result.of(completion, metrics)))

    def fail(self, row: Row, error: RowError) -> None:
        assert row.request is not None, "rank 0 sends only requests that can run"
        self._outgoing.write(encode(RequestError(row.request.index, error.code, error.message)))

    def report_progress(self, progress: Progress) -> None:
        self._outgoing.write(encode(progress))

    def warn(self, text: str) -> None:
        """Do nothing, because only rank 0 shows messages to the user."""

    def close(self) -> None:
        self._outgoing.close()
