"""A link that is slower than the real one: messages are handed out some time after they arrive."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

from sarathi_pp.wire.channel import Clock, Message, Payload, Receiver


class DelayedReceiver(Generic[Payload]):
    """A receiver that hands out another receiver's messages `added_s` seconds later, with a later arrival time.

    The delays of several messages overlap, as on a long line. They do not add up. The other receiver watches the
    sender, so a silent sender is noticed as early as without the delay.
    """

    def __init__(self, receiver: Receiver[Payload], added_s: float, clock: Clock) -> None:
        self._receiver = receiver
        self._added_s = added_s
        self._clock = clock
        self._held: Message[Payload] | None = None

    def receive(self, timeout_s: float | None = None) -> Message[Payload] | None:
        until_s = None if timeout_s is None else self._clock.now() + timeout_s
        if self._held is None:
            message = self._receiver.receive(timeout_s)
            if message is None:
                return None
            self._held = replace(message, arrived_s=message.arrived_s + self._added_s)
        due_s = self._held.arrived_s
        if until_s is not None and until_s < due_s:
            self._clock.sleep(max(0.0, until_s - self._clock.now()))
            return None
        while (left_s := due_s - self._clock.now()) > 0:
            self._clock.sleep(left_s)
        held, self._held = self._held, None
        return held

    def close(self) -> None:
        self._receiver.close()
