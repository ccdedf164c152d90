"""The answer to torch's C++ about a device type unknown to its build: the current device.

A build for CPUs has no guard for CUDA, and creating a CUDA tensor fails there. The guard of meta tensors does nothing,
as ours should. Only its device is changed here. Its virtual functions are found at the places that compilers use on
Linux (Itanium ABI). Their order is that of c10/core/impl/DeviceGuardImplInterface.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

_CUDA, _META = 1, 14
# type, exchangeDevice, getDevice come first; the others are copied.
_NUM_SLOTS = 64
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)

# Objects that C++ holds must not be collected.
_kept: list[object] = []


def give_cuda_a_guard(current: Callable[[], int]) -> None:
    """Register a guard for CUDA. `current` is the index of the device that is current in the calling thread."""
    libc10 = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA]:
        return
    meta = guards[_META]
    assert meta is not None, "torch registers it when it is loaded"
    theirs = ctypes.cast(meta, ctypes.POINTER(ctypes.c_void_p))[0]
    assert theirs is not None
    slots = (ctypes.c_void_p * _NUM_SLOTS).from_buffer_copy(ctypes.string_at(theirs, _NUM_SLOTS * _POINTER_BYTES))
    # A device is two bytes, its type and its index.
    answers = (
        ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda guard: _CUDA),
        ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_uint16)(lambda guard, device: _device(current())),
        ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(lambda guard: _device(current())),
    )
    for slot, answer in enumerate(answers):
        slots[slot] = ctypes.cast(answer, ctypes.c_void_p).value
    guard = (ctypes.c_void_p * 8)(ctypes.addressof(slots))
    _kept.extend((slots, guard, *answers))
    guards[_CUDA] = ctypes.addressof(guard)


def _device(index: int) -> int:
    return _CUDA | index << 8
