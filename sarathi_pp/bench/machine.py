"""What this machine can do, and how undisturbed it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch
from torch.nn import functional

from sarathi_pp.process.host import usable_cpus
from sarathi_pp.trace.clock import SystemClock

# Large enough that a product's rate no longer grows, and that an array is in no cache.
_ROWS, _WIDTH = 1024, 2048
_ARRAY_BYTES = 1 << 29
_MEASURE_S = 1.0
# Others' share of the cores below which a run may start, how long that is waited for, and what it is taken over.
_QUIET, _PATIENCE_S, _LOOK_S = 0.1, 60.0, 0.5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """flops: of matrix products in that dtype, a second; bytes_per_s: of reading memory; both by all cores together."""

    cores: int
    dtype: str
    flops: float
    bytes_per_s: float


def measure_rates(dtype: str) -> MachineRates:
    """Of the cores that this process may use, at their best in a second each. dtype: torch's name."""
    cores, before = usable_cpus(), torch.get_num_threads()
    element: torch.dtype = getattr(torch, dtype)
    torch.set_num_threads(cores)
    try:
        rows, weight = torch.randn(_ROWS, _WIDTH).to(element), torch.randn(_WIDTH, _WIDTH).to(element)
        product_s = _least_s(lambda: functional.linear(rows, weight))
        array = torch.ones(_ARRAY_BYTES // 4)
        read_s = _least_s(array.sum)
    finally:
        torch.set_num_threads(before)
    return MachineRates(cores, dtype, 2 * _ROWS * _WIDTH**2 / product_s, _ARRAY_BYTES / read_s)


def _least_s(call: Callable[[], object]) -> float:
    clock = SystemClock()
    call()
    spans: list[float] = []
    while sum(spans) < _MEASURE_S:
        begin = clock.now()
        call()
        spans.append(clock.now() - begin)
    return min(spans)


def wait_until_quiet() -> float:
    """Returns when others leave the cores alone, or after a minute; the share that they took at last."""
    deadline_s = SystemClock().now() + _PATIENCE_S
    while True:
        busy = psutil.cpu_percent(interval=_LOOK_S) / 100
        if busy < _QUIET or SystemClock().now() > deadline_s:
            return busy


@dataclass
class Stolen:
    """share: of all cores' time, what the host gave to others, once the measurement is over."""

    share: float = field(default=0.0, init=False)


@contextmanager
def stolen() -> Iterator[Stolen]:
    """Measures while it is entered. On a shared virtual machine the largest disturbance there is; Linux counts it, and
    where it is not counted nothing is known to be stolen.
    """
    found, before = Stolen(), psutil.cpu_times()
    yield found
    after = psutil.cpu_times()
    # Guests' time is counted in user's already.
    names = [name for name in after._fields if not name.startswith("guest")]
    passed = sum(getattr(after, name) - getattr(before, name) for name in names)
    found.share = (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / max(passed, 1e-9)
