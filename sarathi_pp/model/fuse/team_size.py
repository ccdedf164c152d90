"""The number of threads that compute the layers of a stage, by a measurement: no more than are worth it.

More threads are not always faster. A few may read weights as fast as the memory can send them. Two hardware threads of
one core share its registers and its arithmetic. And all threads wait for each other several times per layer, so one
whose core is taken by another program delays all.

The number of threads changes no bit of the compiled call (decoder_layers.py). So it may depend on a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

# A microbatch of up to this number of rows mostly waits for weights from memory. One of more rows mostly computes.
_FEW_ROWS = 16
# Numbers of rows that are timed, of the one kind and of the other, and how often each is timed.
_TIMED_FEW, _TIMED_MANY, _TIMES = 8, 64, 3
# More threads are taken if the time is shorter by this factor.
_WORTHWHILE = 1.03


class TeamSize(NamedTuple):
    """The numbers of threads that compute a stage's layers.

    Attributes:
        few: threads for microbatches of few rows.
        many: threads for microbatches of more rows.
    """

    few: int
    many: int

    def threads(self, num_rows: int) -> int:
        return self.few if num_rows <= _FEW_ROWS else self.many


def measured_team(seconds: Callable[[int, int], float], most: int) -> TeamSize:
    """Return the best team of at most `most` threads: the smallest one of about the shortest time.

    `most`, its half, its quarter and so on are timed, until the time gets longer.

    Args:
        seconds: computes the layers once, for a number of rows and with a number of threads, and returns the time.
    """
    return TeamSize(_best(partial(seconds, _TIMED_FEW), most), _best(partial(seconds, _TIMED_MANY), most))


def _best(seconds: Callable[[int], float], most: int) -> int:
    best, best_s = most, min(seconds(most) for _ in range(_TIMES))
    count = most // 2
    while count:
        taken_s = min(seconds(count) for _ in range(_TIMES))
        if taken_s > best_s * _WORTHWHILE:
            break
        best, best_s, count = count, min(taken_s, best_s), count // 2
    return best
