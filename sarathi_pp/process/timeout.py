"""Calls with a timeout, for functions that have none, such as the `check` method of torch's TCPStore (torch 2.13)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_with_timeout(call: Callable[[], T], timeout_s: float, late: T) -> T:
    """Return the call's result or raise its exception. Return `late` if it takes longer than timeout_s.

    A call that takes longer continues in a daemon thread, which ends with the process. Its result is dropped.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # the waiting thread raises it
            raised.append(error)

    thread = threading.Thread(target=work, name="call with timeout", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    return returned[0] if returned else late
