"""The number of threads that compute the layers of a stage, by a measurement: no more than are worth it.

More threads are not always faster. A few may read weights as fast as the memory can send them. Two hardware threads of
one core share its registers and its arithmetic. And all threads wait for each other several times per layer, so one
whose core is taken by another program delays all.

The number of threads changes no bit of the compiled call (decoder_layers.py). So it may depend on a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

# A microbatch of up to this number of rows mostly waits for weights from memory. One of more rows mostly computes.
_FEW_ROWS = 16
# Numbers of rows that are timed, of the one kind and of the other, and how often each is timed.
_TIMED_FEW, _TIMED_MANY, _TIMES = 8, 64, 3
# More threads are taken if the time is shorter by this factor. If it is shorter by the second one, once is enough.
_WORTHWHILE, _HOPELESS = 1.03, 1.3


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

    A team is compared with the one of half its size, from `most` on, until that half is slower. Both are timed in turn,
    since other programs may disturb a while.

    Args:
        seconds: computes a stage once, for a number of rows and with a number of threads, and returns the time.
    """
    return TeamSize(_best(partial(seconds, _TIMED_FEW), most), _best(partial(seconds, _TIMED_MANY), most))


def _best(seconds: Callable[[int], float], most: int) -> int:
    best, shortest_s = most, math.inf
    for half in _halves(most):
        least_s = {best: math.inf, half: math.inf}
        for _ in range(_TIMES):
            for count in (best, half):
                least_s[count] = min(least_s[count], seconds(count))
            if least_s[half] > _HOPELESS * least_s[best]:
                break
        shortest_s = min(shortest_s, *least_s.values())
        if least_s[half] > _WORTHWHILE * shortest_s:
            break
        best = half
    return best


def _halves(most: int) -> Iterator[int]:
    while most > 1:
        most //= 2
        yield most
