"""The rates of this machine, and how much other processes disturb it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch

from sarathi_pp.model.fuse.packed_linear import packed_class, product_name
from sarathi_pp.process.host import usable_cpus
from sarathi_pp.trace.clock import SystemClock

# Sizes of a matrix product that is large enough for the best rate, and of an array that is too large for any cache.
_ROWS, _WIDTH, _OUTPUTS = 1024, 2048, 4096
_ARRAY_BYTES = 1 << 29
_MEASURE_S = 1.0
# The machine is quiet if other processes take less than this share of the cores.
_QUIET = 0.1
# Most seconds to wait until the machine is quiet.
_PATIENCE_S = 60.0
# Seconds over which the share of other processes is measured.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The rates of all usable cores together. Each is the best one over all ways that exist here.

    Attributes:
        cores: number of cores that this process may use.
        product: name of the fastest matrix product, such as "numba float32".
        flops: its floating-point operations per second, with large matrices.
        bytes_per_s: rate of reading memory.
        products: the rates of all products, by name.
    """

    cores: int
    product: str
    flops: float
    bytes_per_s: float
    products: Mapping[str, float]


def measure_rates(weights: str) -> MachineRates:
    """Measure the rates of the cores that this process may use. Each rate is the best one of a second of repeats.

    Args:
        weights: type of the weights, by torch's name. A narrower type than float32 may also be computed in float32.
    """
    cores, before = usable_cpus(), torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        operations = 2 * _ROWS * _WIDTH * _OUTPUTS
        with torch.inference_mode():
            products = {name: operations / _least_s(call) for name, call in _products(weights)}
        array = torch.ones(_ARRAY_BYTES // 4)
        read_s = _least_s(array.sum)
    finally:
        torch.set_num_threads(before)
    fastest = max(products, key=products.__getitem__)
    return MachineRates(cores, fastest, products[fastest], _ARRAY_BYTES / read_s, products)


def _products(weights: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each matrix product that can compute with weights of a type: its name, and a call of it."""
    for compute in ("float32",) if weights == "float32" else (weights, "float32"):
        element: torch.dtype = getattr(torch, compute)
        rows = torch.randn(_ROWS, _WIDTH).to(element)
        linear = torch.nn.Linear(_WIDTH, _OUTPUTS, bias=False, dtype=element)
        yield f"torch {compute}", partial(linear, rows)
        linear.weight.data = linear.weight.data.to(getattr(torch, weights))
        if (packed := packed_class(linear, element)) is not None:
            yield f"{product_name(element, rows.device)} {compute}", partial(packed(linear), rows)


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
    """Wait until other processes take less than a tenth of the cores, at most a minute.

    Return the share of the cores (0 to 1) that they took at the end.
    """
    deadline_s = SystemClock().now() + _PATIENCE_S
    while True:
        busy = psutil.cpu_percent(interval=_LOOK_S) / 100
        if busy < _QUIET or SystemClock().now() > deadline_s:
            return busy


@dataclass
class Stolen:
    """The CPU time that the host gave to other virtual machines.

    Attributes:
        share: this time as a share (0 to 1) of the time of all cores. It is set when the measurement ends.
    """

    share: float = field(default=0.0, init=False)


@contextmanager
def stolen() -> Iterator[Stolen]:
    """Measure inside the block the CPU time that the host gives to other virtual machines.

    On a shared host this is the largest disturbance. Linux counts it as steal time. On other systems the share stays 0.
    """
    found, before = Stolen(), psutil.cpu_times()
    yield found
    after = psutil.cpu_times()
    # The time of guests is part of the user time.
    names = [name for name in after._fields if not name.startswith("guest")]
    passed = sum(getattr(after, name) - getattr(before, name) for name in names)
    found.share = (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / max(passed, 1e-9)
