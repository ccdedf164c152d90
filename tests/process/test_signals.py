"""A signal is never lost, at any point of the main thread."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager

import pytest

from sarathi_pp.errors import StoppedError
from sarathi_pp.process.signals import Signals, stoppable
from sarathi_pp.process.watchdog import Watchdog


class Told:
    """An object that gets a signal in its finaliser, where Python prints a raised error and drops it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # long enough for the handler to run in here
            pass


def heeded() -> AbstractContextManager[None]:
    return Signals("the rank", Watchdog(None)).heeded()


@pytest.mark.parametrize("heed", [lambda: stoppable("the rank"), heeded], ids=["stoppable", "heeded"])
def test_one_that_comes_while_an_object_is_finalised_is_raised_after_it(heed):
    with pytest.raises(StoppedError, match="the rank was stopped by SIGTERM"), heed():
        told = Told()
        del told
        time.sleep(10)
