"""A link that is slower than the real one: what has arrived is handed out so much later."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

from sarathi_pp.wire.channel import Clock, Message, Payload, Receiver


class DelayedReceiver(Generic[Payload]):
    """Another receiver's messages, each no earlier than `added_s` after it arrived there: that is when it arrives here.

    Messages wait beside each other, as on a long line, and not one after the other. Who sends is watched by the other
    receiver, so that silence is no later found than without.
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
