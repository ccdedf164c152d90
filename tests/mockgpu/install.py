"""Simulated GPUs instead of torch.cuda's, for a whole process, with a torch that was built without CUDA."""

from __future__ import annotations

import atexit
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

from tests.mockgpu import machine, nccl
from tests.mockgpu.guard import give_cuda_a_guard
from tests.mockgpu.machine import TIMELINE, TOTAL_BYTES, forbid_in_capture, released
from tests.mockgpu.tensor import MockTensor, made, run
from tests.mockgpu.timeline import MockGpuError

_kept: list[object] = []


def install() -> None:
    """Install the simulation. Triton's interpreter runs kernels, so set TRITON_INTERPRET before they are defined."""
    atexit.register(_look_at_contexts)
    if _kept:  # by the launcher, before it forked this rank
        machine.forget()
        return
    give_cuda_a_guard(machine.current_device)
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **seeds: None,
        "device_count": machine.num_devices,
        "current_device": machine.current_device,
        "set_device": machine.set_device,
        "device": machine.device,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "Mock GPU",
        "get_device_properties": _properties,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": None,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - TIMELINE.live_bytes(), TOTAL_BYTES),
        "memory_allocated": lambda device=None: TIMELINE.live_bytes(),
        "max_memory_allocated": lambda device=None: TIMELINE.peak,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": machine.empty_cache,
        "synchronize": _synchronize,
        "Stream": machine.Stream,
        "Event": machine.Event,
        "stream": machine.stream,
        "set_stream": machine.set_stream,
        "current_stream": machine.current_stream,
        "default_stream": machine.default_stream,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": machine.CUDAGraph,
        "graph": machine.graph,
    }
    for name, simulated in cuda.items():
        setattr(torch.cuda, name, simulated)
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda self, device=None: TIMELINE.is_pinned(self)  # type: ignore[method-assign]
    # Modules that move get new parameters: a host's tensor cannot become one of ours.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _patch_factories()
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "CUDA")
    _kept.append(library)
    _patch_interpreter()
    nccl.install()
    assert torch.empty(0, device="cuda").device.index == 0, "the guard answers"
    machine.contexts.clear()


def _look_at_contexts() -> None:
    """Check contexts. A rank with a context on another rank's device takes memory of that device."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is not None and not machine.contexts <= {int(rank) % machine.num_devices()}:
        TIMELINE.note(f"rank {rank} holds contexts on devices {sorted(machine.contexts)}")


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Mock GPU",
        total_memory=TOTAL_BYTES,
        multi_processor_count=3,
        shared_memory_per_block_optin=232448,
        major=9,
        minor=0,
        uuid=f"GPU-{machine.index_of(device)}",
    )


def _reset_peak(device: object = None) -> None:
    TIMELINE.peak = TIMELINE.live_bytes()


def _synchronize(device: object = None) -> None:
    forbid_in_capture("torch.cuda.synchronize")
    TIMELINE.wait_for_all("torch.cuda.synchronize")


def _pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
    if isinstance(self, MockTensor):
        raise MockGpuError("cannot pin a CUDA tensor; only dense CPU tensors can be pinned")
    forbid_in_capture("pinning memory")
    pinned = self.clone()
    TIMELINE.pin(pinned)
    return pinned


def _patch_factories() -> None:
    """Patch the functions whose arguments torch checks before any operation is called."""
    empty, tensor, arange = torch.empty, torch.tensor, torch.arange
    _device_constructors()  # created once, from the value of `with torch.device(...)`

    def copied(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return tensor(data, device="cpu", **kwargs).to(empty(0).device if device is None else device)

    def pinned_or_not(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        if pin_memory:
            TIMELINE.pin(found)
        return found

    def counted(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Make the range on the host. torch's own operation resizes its result, and a simulated tensor cannot grow."""
        wanted = empty(0).device if device is None else torch.device(device)
        host = arange(*args, device="cpu" if wanted.type == "cuda" else wanted, **kwargs)
        return made(host, torch.device("cuda", machine.index_of(wanted))) if wanted.type == "cuda" else host

    torch.empty, torch.tensor, torch.arange = pinned_or_not, copied, counted


def _patch_interpreter() -> None:
    """Patch the interpreter: kernels get simulated device memory, if all of it is on the device that launches them."""
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from tests.kernels.interpreter import improve

    improve()
    dot = InterpreterBuilder.create_dot

    def widened_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """Widen the operands. The interpreter multiplies the bits of bfloat16."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(one, tl.float32) for one in (a, b))
        return dot(self, a, b, *others)

    InterpreterBuilder.create_dot = widened_dot
    call = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        name = self.fn.__name__
        here = torch.device("cuda", machine.current_device())
        strays = {str(one.device) for one in tensors if one.device != here}
        if strays:
            raise MockGpuError(f"{name}: Pointer argument cannot be accessed from {here}: {', '.join(strays)}")
        hosts = [one.host for one in tensors]
        before = [host.clone() for host in hosts]
        call(self, *(_of_host(one) for one in args), **kwargs)
        pairs = zip(hosts, before, strict=True)
        written = [host for host, old in pairs if not _same(host, old)]
        recording = machine.recording()
        if recording is None:
            TIMELINE.launch(machine.current_stream().number, name, hosts, written)
            return
        for host, old in zip(hosts, before, strict=True):
            host.copy_(old)
        operands = [recording.hold(_of_host(one)) for one in args]
        recording.work.append(lambda: call(self, *map(released, operands), **kwargs))
        recording.reads += map(recording.hold, hosts)
        recording.writes += map(recording.hold, written)

    GridExecutor.__call__ = launch


def _of_host(one: Any) -> Any:
    return one.host if isinstance(one, MockTensor) else one


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
