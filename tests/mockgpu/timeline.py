"""The work of a device's streams and its possible orders: races, and memory used too early or too late.

Everything is computed at once here, so that a race would never show in numbers. Clocks show it instead (vector clocks,
Mattern 1989). Each stream counts its work, and knows how far each other stream must be before it continues. It knows
this from events that it waited for, and from the host's knowledge when it queued the work. A race is two accesses of
the same memory, one of them a write, of which neither knows the other.
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
# A stream, its amount of work then, and the name of that work.
Access = tuple[int, int, str]

# Instead of a stream: memory allocated in a capture belongs to graphs.
POOL = -1


class MockGpuError(RuntimeError):
    """An occasional error of a real device."""


@dataclass(slots=True)
class _Memory:
    """One allocation: its stream, the last write, and reads since then.

    Each access has a stream, its count and its name.
    """

    alive: StorageWeakRef
    num_bytes: int
    stream: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pending:
    """An action of the host when a stream has reached a point."""

    stream: int
    count: int
    done: Callable[[], None]


class Timeline:
    """The timeline of one process, the only one with access to its memory. room: bytes of that memory."""

    def __init__(self, room: int = 1 << 62) -> None:
        self._room = room
        self._lock = threading.RLock()
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = Counter()
        self._memories: dict[int, _Memory] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._pending: list[_Pending] = []
        self.waits: Counter[str] = Counter()  # waits of the host for a device, by their cause
        self.allocated = self.peak = 0

    def launch(self, stream: int, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Launch work. Host tensors represent the device's. Raises MockGpuError for a race."""
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
        """Return the stream's position: all its work so far, and the work that this waits for."""
        with self._lock:
            return self._clocks.setdefault(stream, Counter()).copy()

    def follow(self, stream: int, point: Clock) -> None:
        """Make the stream continue only after a point."""
        with self._lock:
            self._clocks[stream] = self._clocks.setdefault(stream, Counter()) | point

    def seen(self, point: Clock) -> None:
        """Record that the host knows that a point is passed."""
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
        """Make the host wait for it."""
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
        """Call `done` when the host knows that the stream's work so far is finished."""
        with self._lock:
            self._pending.append(_Pending(stream, self.point(stream)[stream], done))

    def reads_later(self, stream: int, source: torch.Tensor) -> None:
        """Record a stream's copy from the host's pinned memory, which must not change before it ends."""
        copy = source.clone()

        def check() -> None:
            if not _same_bits(copy, source):
                self.report("pinned memory was changed before the device had copied it")

        self.later(stream, check)

    def writes_later(self, stream: int, target: torch.Tensor) -> None:
        """Record a stream's copy to the host's pinned memory, which holds other bits until the host has waited."""
        numbers = target.clone()
        target.reshape(-1).view(torch.uint8).fill_(0x55)

        def arrive() -> None:
            target.copy_(numbers)

        self.later(stream, arrive)

    def pin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._pinned = {place: alive for place, alive in self._pinned.items() if not alive.expired()}
            self._pinned[storage.data_ptr()] = StorageWeakRef(storage)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        found = self._pinned.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()

    def allocate(self, tensor: torch.Tensor, stream: int) -> None:
        """Allocate device memory from memory that the stream had; its earlier work may still use it."""
        with self._lock:
            self._sweep()
            memory = self._memory(tensor, stream)
            if self.allocated > self._room:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tensor.nbytes} bytes.")
            if memory is not None and stream != POOL:
                memory.write = (stream, self.point(stream)[stream], "whoever had the memory before")

    def report(self, hazard: str) -> NoReturn:
        """Report an error that no exception can carry: write it to the named file, and raise it too."""
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
        """Record freed memory. The stream that allocated it may reuse it at once."""
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
