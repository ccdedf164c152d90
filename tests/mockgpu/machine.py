"""The state of the simulated GPUs: current devices and streams of each thread, and captured work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.mockgpu.timeline import MockGpuError, Timeline

TOTAL_BYTES = 2 << 30
TIMELINE = Timeline(TOTAL_BYTES)
_stream_numbers = count(100)


class Address:
    """The address of a tensor, which a graph knows but does not keep from being freed."""

    def __init__(self, host: torch.Tensor) -> None:
        self._storage = StorageWeakRef(host.untyped_storage())
        self._dtype = host.dtype
        self._place = host.storage_offset(), host.size(), host.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # type: ignore[attr-defined]
        if storage is None:
            TIMELINE.report("a graph reads or writes memory that was freed after it was captured")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)  # type: ignore[call-overload, no-any-return]


def released(one: Any) -> Any:
    return one.tensor() if isinstance(one, Address) else one


@dataclass(slots=True)
class Recording:
    """Captured operations: each is repeated with its reads, its writes and the memory that it returned.

    Args:
        constants: memory with the numbers of the capture.
        spoilt: a call that no capture allows.
    """

    work: list[Callable[[], None]] = field(default_factory=list)
    reads: list[Any] = field(default_factory=list)
    writes: list[Any] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    spoilt: bool = False

    def hold(self, one: Any) -> Any:
        """Keep the graph's own memory; keep only the address of other memory."""
        if not isinstance(one, torch.Tensor):
            return one
        place = one.untyped_storage().data_ptr()
        own = any(made.untyped_storage().data_ptr() == place for made in (*self.made, *self.constants))
        return one if own or not place else Address(one)


class _Thread(threading.local):
    """State of a thread, as in CUDA: a new thread's device is the first one, whatever other threads chose."""

    def __init__(self) -> None:
        self.device = 0  # no context is made for it before first use
        self.streams: dict[int, Stream] = {}
        self.recording: Recording | None = None


_thread = _Thread()
# Devices on which this process holds a context, hundreds of megabytes each.
contexts: set[int] = set()
captures_failed: list[Recording] = []


def forget() -> None:
    """Forget the choices of the process from which this one was forked."""
    assert not TIMELINE.live_bytes(), "it has memory on a device"
    _thread.__dict__.clear()
    _thread.__dict__.update(_Thread().__dict__)
    contexts.clear()
    captures_failed.clear()


def num_devices() -> int:
    return int(os.environ.get("MOCK_GPUS", "1"))


def current_device() -> int:
    return _thread.device


def set_device(device: object) -> None:
    _thread.device = index_of(device)
    contexts.add(_thread.device)


def index_of(device: object) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    found = torch.device(device).index  # type: ignore[call-overload]
    return current_device() if found is None else int(found)


def recording() -> Recording | None:
    return _thread.recording


def empty_cache() -> None:
    if captures_failed:
        raise MockGpuError("captures_underway.empty() INTERNAL ASSERT FAILED")


def forbid_in_capture(what: str) -> None:
    if _thread.recording is not None:
        _thread.recording.spoilt = True
        raise MockGpuError(f"{what}: operation not permitted when stream is capturing")


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: object = None, priority: int = 0, *, number: int | None = None) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.number = next(_stream_numbers) if number is None else number
        if number is None:
            contexts.add(self.device_index)

    def wait_stream(self, stream: Stream) -> None:
        TIMELINE.follow(self.number, TIMELINE.point(stream.number))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        forbid_in_capture("Stream.synchronize")
        TIMELINE.wait(TIMELINE.point(self.number), "Stream.synchronize")

    def query(self) -> bool:
        return TIMELINE.is_seen(TIMELINE.point(self.number))


def current_stream(device: object = None) -> Stream:
    index = index_of(device)
    return _thread.streams.get(index) or default_stream(index)


def default_stream(device: object = None) -> Stream:
    index = index_of(device)
    return Stream(index, number=index)


def set_stream(stream: Stream) -> None:
    """Set the stream; its device becomes the current one too."""
    set_device(stream.device_index)
    _thread.streams[stream.device_index] = stream


class stream:  # noqa: N801  torch's name
    """torch.cuda.stream: inside, the stream and its device are the current ones."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = current_stream(), current_stream(self._stream.device_index)
            set_stream(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._stream is not None:
            of_thread, of_device = self._before
            set_stream(of_device)
            set_stream(of_thread)


class device:  # noqa: N801  torch's name
    """torch.cuda.device."""

    def __init__(self, device: object) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before, _thread.device = _thread.device, self._index

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        _thread.device = self._before


class Event:
    """torch.cuda.Event. The first query returns False, as on a device that runs late."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._point: Any = None
        self._asked = False

    def record(self, stream: Stream | None = None) -> None:
        found = stream or current_stream()
        self._point = TIMELINE.point(found.number)
        self._device = found.device_index
        self._asked = False
        self._at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        if self._point is not None:
            TIMELINE.follow((stream or current_stream()).number, self._point)

    def query(self) -> bool:
        if self._point is None or TIMELINE.is_seen(self._point):
            return True
        if not self._asked:
            self._asked = True
            return False
        TIMELINE.seen(self._point)
        return True

    def synchronize(self) -> None:
        forbid_in_capture("Event.synchronize")
        if self._point is not None:
            TIMELINE.wait(self._point, "Event.synchronize")

    def elapsed_time(self, end_event: Event) -> float:
        for event in (self, end_event):
            if not event._timed or event._point is None:
                raise MockGpuError("elapsed_time of an event without enable_timing, or that was not recorded")
            if not TIMELINE.is_seen(event._point):
                raise MockGpuError("elapsed_time: device not ready")
        if self._device != end_event._device:
            raise MockGpuError("elapsed_time of events of two devices")
        return 1e3 * (end_event._at_s - self._at_s)


class CUDAGraph:
    """torch.cuda.CUDAGraph: repeats the captured work with the numbers and addresses of the capture."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recorded: Recording | None = None

    def replay(self) -> None:
        found = self._recorded
        if found is None:
            raise MockGpuError("replay of a graph that was not captured")
        reads, writes = ([released(one) for one in some] for some in (found.reads, found.writes))
        TIMELINE.launch(current_stream().number, "a graph", reads, writes)
        with torch.inference_mode():
            for one in found.work:
                one()


class graph:  # noqa: N801  torch's name
    """torch.cuda.graph. Nothing is computed during a capture: its results hold no numbers."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: object = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._stream = stream or Stream()

    def __enter__(self) -> None:
        forbid_in_capture("a capture inside another")
        if self._graph._recorded is not None:
            raise MockGpuError("a graph is captured once")
        TIMELINE.wait_for_all("capture")
        self._inside = globals()["stream"](self._stream)
        self._inside.__enter__()
        _thread.recording = Recording()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        found, _thread.recording = _thread.recording, None
        if found is not None and found.spoilt:
            # As in torch, the stream of the capture stays the current one. Before 2.12 the allocator treats the capture
            # as still active.
            captures_failed.append(found)
            raise MockGpuError("operation failed due to a previous error during capture")
        self._inside.__exit__(kind, error, trace)
        if kind is None and found is not None:
            for made in found.made:
                spoil(made)
            self._graph._recorded = found


def spoil(host: torch.Tensor) -> None:
    """Fill with NaN, or with numbers that are no index."""
    storage = host.untyped_storage()
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # type: ignore[call-overload]
