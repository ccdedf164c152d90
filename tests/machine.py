"""Slowness of this machine now, compared with the machine on which the bounds in tests were chosen.

A bound detects a test that hangs; it does not measure speed. So it grows with the machine: other work at the same time,
older cores and sanitizers slow down everything alike.
"""

from __future__ import annotations

import os
import statistics
import time

# Seconds of one piece of work on a quiet core of an AMD EPYC with AVX512-BF16 (2026-11).
_REFERENCE_S = 0.028
_PIECES = 9
_VARIABLE = "SARATHI_PP_TEST_SLOWNESS"


def patient(seconds: float) -> float:
    """Scale a time limit of the reference machine to this machine."""
    return seconds * slowness()


def slowness(workers: int = 1) -> float:
    """Return a factor of at least 1. It is measured once; every process that is started later inherits it.

    Args:
        workers: number of tests that run at a time.
    """
    if _VARIABLE not in os.environ:
        # A test's own processes would use all cores.
        os.environ[_VARIABLE] = f"{max(1.0, workers * _measure_s() / _REFERENCE_S):.2f}"
    return float(os.environ[_VARIABLE])


def _measure_s() -> float:
    """Measure a piece of work in plain Python: median wall seconds, which include the effect of other processes."""
    taken = []
    for _ in range(_PIECES):
        begin_s = time.perf_counter()
        sum(number * number % 7 for number in range(500_000))
        taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken)


if __name__ == "__main__":
    print(f"{slowness():.2f}")
