"""What a device's streams were given and in which order it could do that: races, and memory used too early or too late.

Everything is computed at once here, so that a race would never show in numbers. It shows in clocks instead: each stream
counts its work and knows how far each other stream must have come before it goes on (vector clocks, Mattern 1989), by
events that it waited for and by what the host had seen when it gave the work. Two accesses of the same memory, one of
them a write, of which neither knows the other are a race on a real device.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Clock = Counter[int]
# A stream, how much it had done by then, and what that was.
Access = tuple[int, int, str]

# In the place of a stream: what was allocated in a capture belongs to graphs.
POOL = -1


class MockGpuError(RuntimeError):
    """What a real device would do wrong, now and then."""


@dataclass(slots=True)
class _Memory:
    """One allocation: by which stream, the last write, and reads since, each a stream, its count and what it was."""

    alive: StorageWeakRef
    num_bytes: int
    stream: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pending:
    """What happens on the host's side when a stream has come so far."""

    stream: int
    count: int
    done: Callable[[], None]


class Timeline:
    """Of one process, which is all that ever sees its memory. room: bytes of that."""

    def __init__(self, room: int = 1 << 62) -> None:
        self._room = room
        self._lock = threading.RLock()
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = Counter()
        self._memories: dict[int, _Memory] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._pending: list[_Pending] = []
        self.waits: Counter[str] = Counter()  # of the host for a device, by what made it wait
        self.allocated = self.peak = 0

    def launch(self, stream: int, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Host tensors that stand for the device's. Raises MockGpuError for a race."""
        with self._lock:
            clock = self._clocks.setdefault(stream, Counter())
            clock |= self._host
            clock[stream] += 1
            self._clocks[stream] = clock
            for tensor in reads:
                memory = self._memory(tensor, stream)
                if memory is not None:
                    self._after(clock, memory.write, what, "reads what is being written")
                    memory.reads[stream] = (stream, clock[stream], what)
            for tensor in writes:
                memory = self._memory(tensor, stream)
                if memory is not None:
                    self._after(clock, memory.write, what, "writes what is being written")
                    for read in memory.reads.values():
                        self._after(clock, read, what, "writes what is being read")
                    memory.write, memory.reads = (stream, clock[stream], what), {}

    def point(self, stream: int) -> Clock:
        """All that a stream was given so far, and what that waits for."""
        with self._lock:
            return self._clocks.setdefault(stream, Counter()).copy()

    def follow(self, stream: int, point: Clock) -> None:
        """The stream goes on behind a point."""
        with self._lock:
            self._clocks[stream] = self._clocks.setdefault(stream, Counter()) | point

    def seen(self, point: Clock) -> None:
        """The host knows that a point is passed."""
        with self._lock:
            self._host |= point
            ready = [one for one in self._pending if self._host[one.stream] >= one.count]
            self._pending = [one for one in self._pending if one not in ready]
        for one in ready:
            one.done()

    def is_seen(self, point: Clock) -> bool:
        with self._lock:
            return all(self._host[stream] >= count for stream, count in point.items())

    def wait(self, point: Clock, what: str) -> None:
        """The host waits for it."""
        with self._lock:
            self.waits[what] += 1
        self.seen(point)

    def wait_for_all(self, what: str) -> None:
        with self._lock:
            everything: Clock = Counter()
            for clock in self._clocks.values():
                everything |= clock
        self.wait(everything, what)

    def later(self, stream: int, done: Callable[[], None]) -> None:
        """done: when the host has seen what the stream was given so far."""
        with self._lock:
            self._pending.append(_Pending(stream, self.point(stream)[stream], done))

    def reads_later(self, stream: int, source: torch.Tensor) -> None:
        """The stream copies from the host's pinned memory, which must not change before it has."""
        copy = source.clone()

        def check() -> None:
            if not _same_bits(copy, source):
                self.report("pinned memory was changed before the device had copied it")

        self.later(stream, check)

    def pin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._pinned = {place: alive for place, alive in self._pinned.items() if not alive.expired()}
            self._pinned[storage.data_ptr()] = StorageWeakRef(storage)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        found = self._pinned.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()

    def allocate(self, tensor: torch.Tensor, stream: int) -> None:
        """Its memory is a device's, of what the stream had: what that was given so far may be using it still."""
        with self._lock:
            self._sweep()
            memory = self._memory(tensor, stream)
            if self.allocated > self._room:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tensor.nbytes} bytes.")
            if memory is not None and stream != POOL:
                memory.write = (stream, self.point(stream)[stream], "whoever had the memory before")

    def report(self, hazard: str) -> NoReturn:
        """Of what nobody can be told by an exception: into the file of that name, and raised all the same."""
        self.note(hazard)
        raise MockGpuError(hazard)

    def note(self, hazard: str) -> None:
        place = os.environ.get("MOCK_GPU_HAZARDS")
        if place is not None:
            with Path(place).open("a") as hazards:
                hazards.write(hazard + "\n")

    def live_bytes(self) -> int:
        with self._lock:
            self._sweep()
            return self.allocated

    def _memory(self, tensor: torch.Tensor, stream: int) -> _Memory | None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if not place:
            return None
        memory = self._memories.get(place)
        if memory is not None and memory.alive.expired():
            self._freed(place)
            memory = None
        if memory is None:
            memory = self._memories[place] = _Memory(StorageWeakRef(storage), storage.nbytes(), stream)
            self.allocated += memory.num_bytes
            self.peak = max(self.peak, self.allocated)
        return memory

    def _sweep(self) -> None:
        for place in [place for place, memory in self._memories.items() if memory.alive.expired()]:
            self._freed(place)

    def _freed(self, place: int) -> None:
        """The stream that allocated it may use it at once for something else."""
        memory = self._memories.pop(place)
        self.allocated -= memory.num_bytes
        if memory.stream == POOL:
            return
        clock = self._clocks.setdefault(memory.stream, Counter()) | self._host
        accesses = [*memory.reads.values(), *([memory.write] if memory.write is not None else [])]
        for stream, count, what in accesses:
            if stream != memory.stream and clock[stream] < count:
                self.report(f"memory of stream {memory.stream} was freed before {what} on stream {stream} was over")

    def _after(self, clock: Clock, access: Access | None, what: str, how: str) -> None:
        if access is not None and clock[access[0]] < access[1]:
            self.report(f"{what} {how} by {access[2]} on stream {access[0]}, for which it has not waited")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
