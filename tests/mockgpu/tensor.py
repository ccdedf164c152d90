"""Tensors that report a CUDA device and are stored in the host's memory.

All operations run there, after a check for uses that a real device refuses or delays. These are operands of two
devices, reads of unwritten memory, copies that the host must wait for, and captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.mockgpu import machine
from tests.mockgpu.flash import varlen_attn
from tests.mockgpu.machine import TIMELINE, forbid_in_capture, released, spoil
from tests.mockgpu.timeline import POOL, MockGpuError

# These work between devices; all others need their operands on one.
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::to")
# Only the device knows their size or their answer.
_ANSWERS = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::bincount",
)
_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like")
# These may take indices from the host, which it copies first.
_INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


def _histc(x: torch.Tensor, *bounds: Any, **how: Any) -> torch.Tensor:
    return torch.histc(x.float(), *bounds, **how).to(x.dtype)


# Operations of a device that the host lacks.
_INSTEAD: dict[str, Callable[..., Any]] = {"torch_attn::_varlen_attn": varlen_attn, "aten::histc": _histc}


class MockTensor(torch.Tensor):
    """A tensor on a simulated device. host: the numbers."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> MockTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=device,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.host!r} on {self.device}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation of torch, of which an operand or the result is on a device."""
    name = func._schema.name
    flat, tree = tree_flatten((tuple(args), dict(kwargs)))
    ours = [one for one in flat if isinstance(one, MockTensor)]
    of_host = [one for one in flat if isinstance(one, torch.Tensor) and not isinstance(one, MockTensor)]
    target = kwargs.get("device", next((one for one in args if isinstance(one, torch.device)), None))
    if name not in _COPIES:
        _look_at_devices(name, ours, of_host)
    if name in _ANSWERS:
        forbid_in_capture(name)
    here = _device(ours, target)
    machine.contexts.add(here.index)
    mutated = [one.host for one in _mutated(func, args, kwargs) if isinstance(one, MockTensor)]
    host_args, host_kwargs = tree_unflatten([_to_host(one) for one in flat], tree)
    if name == "aten::_fused_sdp_choice":
        return 0  # choices for CPU do not apply to a device
    call = _INSTEAD.get(name, func)
    number = machine.current_stream(here).number
    crosses = name in _COPIES and _crosses(name, args, target)
    if crosses:
        _look_at_copy(name, args, kwargs)
    kept = [one.clone() for one in mutated] if machine.recording() is not None else []
    found = call(*host_args, **host_kwargs)
    if machine.recording() is None and (mutated or not _is_view(found, ours)):
        TIMELINE.launch(number, name, [one.host for one in ours], mutated)
    if name in _ANSWERS:
        TIMELINE.wait(TIMELINE.point(number), name)
    numbers = [] if name in _COPIES else [one for one in of_host if not one.dim()]
    _record(call, (host_args, host_kwargs), found, ours, mutated, kept, numbers)
    if target is not None and torch.device(target).type == "cpu":
        _wait_for_copy(name, args, kwargs, number)
        return found
    if crosses and name == "aten::copy_" and not isinstance(args[0], MockTensor):
        _wait_for_copy(name, args, kwargs, number)
        return args[0]
    result = _wrapped(found, flat, here, number, fresh=name in _EMPTY)
    if crosses:
        _wait_for_copy(name, args, kwargs, number)
    return result


def _device(ours: Sequence[MockTensor], target: object) -> torch.device:
    wanted = None if target is None else torch.device(target)  # type: ignore[call-overload]
    if wanted is None or wanted.type == "cpu":
        return ours[0].device
    return torch.device("cuda", machine.index_of(wanted))


def _look_at_devices(name: str, ours: Sequence[MockTensor], of_host: Sequence[torch.Tensor]) -> None:
    devices = {one.device for one in ours}
    stray = [one for one in of_host if one.dim()]
    if stray and name in _INDEXED:
        forbid_in_capture(f"{name} with indices on the host")
        TIMELINE.waits[f"{name} with indices on the host"] += 1
        stray = []
    if len(devices) > 1 or (devices and stray):
        found = sorted({str(one.device) for one in (*ours, *stray)})
        raise MockGpuError(f"{name}: Expected all tensors to be on the same device, but found {', '.join(found)}")


def _mutated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return found


def _to_host(one: Any) -> Any:
    if isinstance(one, MockTensor):
        return one.host
    if isinstance(one, torch.device) and one.type == "cuda":
        return torch.device("cpu")
    if isinstance(one, torch.Generator) and one.device.type == "cuda":
        raise MockGpuError("generators of devices are not simulated")
    return one


def _crosses(name: str, args: Sequence[Any], target: object) -> bool:
    if name == "aten::copy_":
        return isinstance(args[0], MockTensor) != isinstance(args[1], MockTensor)
    if isinstance(args[0], MockTensor):
        return target is not None and torch.device(target).type == "cpu"  # type: ignore[call-overload]
    return True


def _is_asynchronous(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False))


def _look_at_copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check a copy between host and device for forbidden uses."""
    asynchronous, source = _is_asynchronous(name, args, kwargs), args[1] if name == "aten::copy_" else args[0]
    if isinstance(source, MockTensor):
        forbid_in_capture("a copy to the host")
        if asynchronous and not (name == "aten::copy_" and TIMELINE.is_pinned(args[0])):
            raise MockGpuError("a copy to the host that nobody waits for: what it gives is not there yet")
    elif not (TIMELINE.is_pinned(source) and asynchronous):
        forbid_in_capture("a copy from memory that is not pinned")


def _wait_for_copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], number: int) -> None:
    """Make the host wait for the copy, unless it is asynchronous and from or to pinned memory."""
    source = args[1] if name == "aten::copy_" else args[0]
    if isinstance(source, MockTensor) and _is_asynchronous(name, args, kwargs):
        TIMELINE.writes_later(number, args[0])
    elif isinstance(source, MockTensor):
        TIMELINE.wait(TIMELINE.point(number), "copy to the host")
    elif TIMELINE.is_pinned(source) and _is_asynchronous(name, args, kwargs):
        TIMELINE.reads_later(number, source)
    else:
        TIMELINE.wait(TIMELINE.point(number), "copy from the host")


def _record(
    call: Callable[..., Any],
    given: tuple[Any, Any],
    found: Any,
    ours: Sequence[MockTensor],
    mutated: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
) -> None:
    """Record the call into the active graph, if any. A capture computes no results, so earlier values are restored.

    Args:
        numbers: operands of one number on the host. A graph has their values, not their addresses.
    """
    recording = machine.recording()
    if recording is None:
        return
    for now, before in zip(mutated, kept, strict=True):
        if now.shape == before.shape:  # otherwise it was created for this
            now.copy_(before)
    places = {one.host.untyped_storage().data_ptr() for one in ours}
    results = [one for one in tree_flatten(found)[0] if isinstance(one, torch.Tensor)]
    of_own = [one.untyped_storage().data_ptr() not in places for one in results]
    recording.made += [result for result, own in zip(results, of_own, strict=True) if own]
    constants = {id(one): one.clone() for one in numbers}
    operands = tree_map(lambda one: constants[id(one)] if id(one) in constants else recording.hold(one), given)
    is_empty = getattr(call, "_schema", None) is not None and call._schema.name in _EMPTY

    def redo() -> None:
        host_args, host_kwargs = tree_map(released, operands)
        new = [one for one in tree_flatten(call(*host_args, **host_kwargs))[0] if isinstance(one, torch.Tensor)]
        for result, own, value in zip(results, of_own, new, strict=True):
            if own and is_empty:
                spoil(result)
            elif own:
                result.copy_(value)

    recording.work.append(redo)
    recording.reads += [recording.hold(one.host) for one in ours]
    recording.writes += [recording.hold(one) for one in mutated]


def made(host: torch.Tensor, device: torch.device) -> MockTensor:
    """Make new memory of a device, with these numbers."""
    number = machine.current_stream(device).number
    recording = machine.recording()
    if recording is None:
        TIMELINE.allocate(host, number)
        TIMELINE.launch(number, "a factory", (), (host,))
    else:
        TIMELINE.allocate(host, POOL)
        recording.constants.append(host)
    return wrapped(host, device)


def wrapped(host: torch.Tensor, device: torch.device) -> MockTensor:
    # An inference tensor fails if views of it are made inside an inference mode and outside.
    with torch.inference_mode(False):
        return MockTensor(host, device)


def _is_view(found: Any, ours: Sequence[MockTensor]) -> bool:
    """Return True if the device has nothing to do."""
    places = {one.host.untyped_storage().data_ptr() for one in ours}
    results = [one for one in tree_flatten(found)[0] if isinstance(one, torch.Tensor)]
    return bool(results) and all(one.untyped_storage().data_ptr() in places for one in results)


def _wrapped(found: Any, flat: Sequence[Any], device: torch.device, number: int, *, fresh: bool) -> Any:
    """Wrap results, so that an operand comes back as the same object."""
    given = {id(one.host): one for one in flat if isinstance(one, MockTensor)}

    def wrap(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in given:
            return given[id(one)]
        is_new = one.untyped_storage().data_ptr() not in places
        if fresh:
            spoil(one)
        if machine.recording() is not None:
            if is_new:
                TIMELINE.allocate(one, POOL)
        elif is_new:
            TIMELINE.allocate(one, number)
            if not fresh:
                TIMELINE.launch(number, "its result", (), (one,))
        return wrapped(one, device)

    places = {one.host.untyped_storage().data_ptr() for one in flat if isinstance(one, MockTensor)}
    return tree_map(wrap, found)
