"""Waiting no longer than so long for a call that heeds no timeout, as a TCPStore's `check` does not (torch 2.13)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], late: T) -> T:
    """What the call returns or raises; `late` where it has not by then, and is left to a thread that dies with us."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # raised by the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, name="bounded call", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return returned[0] if returned else late
