"""How much of the cores' time the host gave to others: on a shared virtual machine the largest disturbance there is.

Linux counts it (`steal` in /proc/stat). Where it does not, nothing is known to be stolen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 7  # of the numbers behind "cpu"


@dataclass
class Stolen:
    """share: of all cores' time, once the measurement is over."""

    share: float = field(default=0.0, init=False)


@contextmanager
def stolen() -> Iterator[Stolen]:
    """Measures while it is entered."""
    found, (steal_before, before) = Stolen(), _ticks()
    yield found
    steal, after = _ticks()
    found.share = (steal - steal_before) / max(1, after - before)


def _ticks() -> tuple[int, int]:
    """Stolen, and all (guests' time is counted in user's already)."""
    if not _STAT.exists():
        return 0, 0
    numbers = list(map(int, _STAT.read_text().splitlines()[0].split()[1:9]))
    return numbers[_STEAL], sum(numbers)
