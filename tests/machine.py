"""How much slower this machine is now than the one on which the bounds in tests were chosen.

A bound says when a test has hung, not how fast something is. So it grows with the machine: other work beside the tests,
older cores and sanitizers make everything slower alike.
"""

from __future__ import annotations

import os
import statistics
import time

# Of a quiet core of an AMD EPYC with AVX512-BF16 (2026-11), for one piece of work.
_REFERENCE_S = 0.028
_PIECES = 9
_VARIABLE = "SARATHI_PP_TEST_SLOWNESS"


def patient(seconds: float) -> float:
    """Return what takes at most so long on the reference machine, for this one."""
    return seconds * slowness()


def slowness(workers: int = 1) -> float:
    """Return a factor of at least 1. It is measured once; every process that is started later inherits it.

    Args:
        workers: how many tests run at a time.
    """
    if _VARIABLE not in os.environ:
        # A test's own processes would use all cores.
        os.environ[_VARIABLE] = f"{max(1.0, workers * _measure_s() / _REFERENCE_S):.2f}"
    return float(os.environ[_VARIABLE])


def _measure_s() -> float:
    """Wall seconds of a piece of work in plain Python, the median of several: what else runs here counts."""
    taken = []
    for _ in range(_PIECES):
        begin_s = time.perf_counter()
        sum(number * number % 7 for number in range(500_000))
        taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken)


if __name__ == "__main__":
    print(f"{slowness():.2f}")
