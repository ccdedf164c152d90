"""A tensor that was read, on its way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


class Arrived:
    """A tensor that was read, on its way to a device. transformers' loader calls only its `to`.

    The loader asks for every tensor in host memory, unless accelerate gives it another device. Then the whole stage
    would be in host memory before it moves to the device. So `to` ignores the requested device and moves the tensor to
    ours. Only a few tensors are in host memory at a time.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self._device = device

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._host.to(self._device, dtype)


def on_device(host: Tensor, device: torch.device | None) -> Tensor | Arrived:
    """Return a tensor for transformers' loader, which will be on this device; None for host memory."""
    return host if device is None or device.type == "cpu" else Arrived(host, device)
