"""The choice of the backend of a layer with a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, StateCache
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
        if self._numba is not None and why_not_numba(dtype, device, widths) is None:
            return self._numba
        return self._torch


def why_not_numba(dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> str | None:
    """Return why numba's kernels cannot compute a layer; None if they can. See `Backends.choose` for the arguments."""
    if device.type != "cpu":
        return f"not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"not in {str(dtype).removeprefix('torch.')}"
    if not has_float_products():
        return "needs the package numba, and a processor with AVX2, AVX512 or AArch64"
    odd = [width for width in widths if width % _LINE]
    return f"{odd[0]} channels are no multiple of {_LINE}" if odd else None


def state_widths(caches: Sequence[LayerCache]) -> tuple[int, ...]:
    """Return the widths by which the backend of a model's layers is chosen; empty if no layer keeps a state.

    Blocks of a recurrent state have 16 columns only if these divide the columns of a head.
    """
    states = {cache for cache in caches if isinstance(cache, StateCache)}
    return tuple(sorted({width for cache in states for width in cache.recurrent[1:] or cache.conv[1:]}))


def state_backend(caches: Sequence[LayerCache], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the name of the backend of a model's layers with a state; None if no layer keeps one."""
    widths = state_widths(caches)
    if not widths:
        return None
    return "numba" if why_not_numba(dtype, device, widths) is None else "torch"
