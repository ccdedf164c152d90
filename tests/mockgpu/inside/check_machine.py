"""Errors that the simulated device detects."""

from __future__ import annotations

import pytest
import torch
from sarathi_pp_kernels.triton.gate import silu_multiply

from tests.mockgpu import machine
from tests.mockgpu.machine import TIMELINE
from tests.mockgpu.timeline import MockGpuError

GPU = torch.device("cuda", 0)


def test_operands_are_on_one_device():
    x = torch.ones(3, device=GPU)
    assert (x + 1).tolist() == [2.0, 2.0, 2.0] and x.is_cuda
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(MockGpuError, match="all tensors to be on the same device"):
            x + other


def test_nobody_has_written_to_new_memory():
    assert torch.empty(2, device=GPU).isnan().all()
    assert torch.empty(2, dtype=torch.int64, device=GPU).tolist() == [-1, -1]


def test_who_waits_for_a_copy():
    x = torch.ones(3, device=GPU)
    before = TIMELINE.waits.copy()
    x.copy_(torch.zeros(3).pin_memory(), non_blocking=True)
    assert TIMELINE.waits == before
    x.copy_(torch.zeros(3), non_blocking=True)
    assert TIMELINE.waits["copy from the host"] == before["copy from the host"] + 1
    assert x.cpu().tolist() == [0, 0, 0]
    assert TIMELINE.waits["copy to the host"] == before["copy to the host"] + 1
    with pytest.raises(MockGpuError, match="nobody waits for"):
        x.to("cpu", non_blocking=True)


def test_pinned_memory_must_last_until_its_own_copy_is_over(monkeypatch):
    monkeypatch.delenv("MOCK_GPU_HAZARDS")  # this hazard is no fault
    x, pinned = torch.ones(3, device=GPU), torch.zeros(3).pin_memory()
    other = torch.cuda.Stream()
    x.copy_(pinned, non_blocking=True)
    with torch.cuda.stream(other):
        event = torch.cuda.Event()
        event.record()
    event.synchronize()
    pinned.fill_(7)
    with pytest.raises(MockGpuError, match="pinned memory was changed"):
        torch.cuda.synchronize()


def test_a_graph_keeps_nothing_alive_that_it_only_reads(monkeypatch):
    monkeypatch.delenv("MOCK_GPU_HAZARDS")
    out, given = torch.zeros(2, device=GPU), torch.ones(2, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(given * 2)
    graph.replay()
    assert out.tolist() == [2, 2]
    del given
    with pytest.raises(MockGpuError, match="freed after it was captured"):
        graph.replay()


def test_memory_ends():
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(machine.TOTAL_BYTES // 4 + 1, device=GPU)
    assert torch.zeros(4, device=GPU).tolist() == [0] * 4


def test_kernels_run_on_the_device_that_is_current():
    x = torch.ones(1, 4, device="cuda:1")
    with pytest.raises(MockGpuError, match="cannot be accessed from cuda:0"):
        silu_multiply(x)
    with torch.cuda.device(1):
        assert silu_multiply(x).shape == (1, 2)
    with pytest.raises(MockGpuError, match="cannot be accessed"):
        silu_multiply(torch.ones(1, 4))


def test_a_replay_does_what_was_captured_with_what_is_there_now():
    """The capture computes nothing. Numbers from the host keep their values at the capture."""
    x, out = torch.ones(2, device=GPU), torch.zeros(2, device=GPU)
    factor = 3.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = x * factor
        out.copy_(inner + 1)
    assert out.tolist() == [0, 0] and inner.isnan().all()
    factor = 5.0
    graph.replay()
    assert out.tolist() == [4, 4]
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [7, 7]


def test_a_graph_has_the_value_of_a_number_on_the_host():
    """Its address is that of memory which is freed after the capture."""
    x, graph = torch.zeros(4, device=GPU), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x[1:3] = 5
        x.mul_(torch.tensor(2.0))
    graph.replay()
    assert x.tolist() == [0, 10, 10, 0]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.copy_(torch.zeros(2)),
        lambda x: torch.zeros(2).pin_memory(),
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["copy to the host", "a branch", "pageable copy", "pinning", "synchronize"],
)
def test_a_capture_is_spoilt_by_what_waits(forbidden):
    x = torch.ones(2, device=GPU)
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    with pytest.raises(MockGpuError, match="previous error during capture"), torch.cuda.graph(graph):
        forbidden(x)
    assert torch.cuda.current_stream().number != before.number, "as torch leaves it"
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()
    torch.cuda.set_stream(before)
    machine.captures_failed.clear()


def test_an_event_is_not_over_when_it_is_first_asked():
    event, other = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    event.record()
    torch.ones(1, device=GPU)
    other.record()
    with pytest.raises(MockGpuError, match="not ready"):
        event.elapsed_time(other)
    assert not other.query() and other.query()
    assert event.elapsed_time(other) >= 0


def test_a_thread_begins_on_the_first_device():
    import threading

    torch.cuda.set_device(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert seen == [0] and torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
