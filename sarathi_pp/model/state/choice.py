"""The choice of the backend of a layer with a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sarathi_pp.model.dtypes import has_float_products
from sarathi_pp.model.state.backend import StateBackend
from sarathi_pp.model.state.torch_backend import TorchState

_LINE = 16


class Backends:
    """The backends of one stage. Layers share them, because they keep the spans of a microbatch.

    Args:
        kernels: use compiled kernels on CPU, if numba and the processor allow it.
    """

    def __init__(self, *, kernels: bool = True) -> None:
        self._torch = TorchState()
        self._numba: StateBackend | None = None
        if kernels and has_float_products():
            from sarathi_pp.model.state.numba_backend import NumbaState  # numba is optional

            self._numba = NumbaState()

    def choose(self, dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> StateBackend:
        """Return the fastest backend for a layer.

        Args:
            dtype: type of the activations.
            widths: numbers of channels of the layer's heads, or of its convolution.
        """
        fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        if self._numba is not None and fits and all(width % _LINE == 0 for width in widths):
            return self._numba
        return self._torch
