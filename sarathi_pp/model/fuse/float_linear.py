"""Linear layers in float32 on CPU, with weights packed once in the layout that our matrix product reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from sarathi_pp_kernels.cpu.huge_pages import empty_in_large_pages, release
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range
from torch import Tensor, nn
from torch.nn import functional

from sarathi_pp.model.dtypes import has_float_products

# Outputs of a panel.
PANEL = 16
# Types of weights that the product widens in registers.
NARROW = (torch.bfloat16, torch.float16)


@functools.cache
def has_float_gemm() -> bool:
    """Return whether our matrix product in float32 runs here. See `has_float_products`."""
    return has_float_products()


def float_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias with the bits of FloatLinear, for a weight that is not packed. It needs our product.

    Args:
        x: (..., K) float32 on CPU.
        weight: (N, K) float32, or of a type of NARROW. It is not copied if it or its transpose is contiguous, and no
            float32 copy is made of a narrow one with an even K.
        bias: (N,) or (1, N) float32, or one number for all outputs; None for none.
    """
    from sarathi_pp_kernels.cpu import gemm  # numba is optional

    weight = weight.detach()
    outputs, inputs = weight.shape
    # The product takes addresses, so it would not notice a wrong type or shape.
    assert weight.dtype in (torch.float32, *NARROW) and weight.is_cpu, f"{weight.dtype} weight on {weight.device}"
    assert x.shape[-1] == inputs > 0, f"rows {tuple(x.shape)}, weight {tuple(weight.shape)}"
    weight = weight.to(_held_type(inputs, weight))
    in_columns = weight.T.is_contiguous() and not weight.is_contiguous()
    if not in_columns:
        weight = weight.contiguous()
    kernel = _kernels(weight.dtype).unpacked
    lines = inputs // _inputs_per_line(weight.dtype)
    begin = torch.zeros(_padded(outputs))
    if bias is not None:
        begin[:outputs] = bias.detach()

    def multiply(tiles: Tensor, out: Tensor, num_rows: int, panels: range) -> None:
        scratch = torch.empty(gemm.PANELS * lines * PANEL)
        ranges = panels.start, panels.stop, len(begin)
        of_weight = weight.data_ptr(), in_columns, outputs, begin.data_ptr()
        kernel(tiles.data_ptr(), *of_weight, out.data_ptr(), num_rows, lines, *ranges, scratch.data_ptr())

    return _product(x, inputs, outputs, multiply)


class FloatLinear(nn.Module):
    """A linear layer by our own product: x @ weight.T + bias for float32 x (..., in_features).

    Several linear layers with the same input become one layer, with their outputs next to each other. Weights of a type
    of NARROW keep it, and are widened in registers. A row's result depends on nothing but the row. The outputs are
    divided among torch's number of threads.

    Args:
        linears: the layers to pack.
        frees: give back the memory of each weight when it is packed. Nothing may read it any more.

    Attributes:
        held_type: type of the weights in memory.
        num_parts: number of equal parts of the outputs. Each part is computed in a call of its own.
    """

    num_parts = 1

    def __init__(self, *linears: nn.Linear, frees: bool = False) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        weights = [linear.weight.detach() for linear in linears]
        held = _held_type(self.in_features, *weights)
        self.held_type = held
        self._multiply = _kernels(held).packed
        self._width = _padded(self.out_features)
        lines = self.in_features // _inputs_per_line(held)
        # Neither weight nor bias is a buffer, because a packed weight can be neither moved nor saved.
        self._weight = empty_in_large_pages((self._width // PANEL, lines, PANEL), torch.int32)
        pack(weights, self._weight, held, frees=frees)
        self._bias = torch.zeros(self._width)
        biases = [torch.zeros(one.out_features) if one.bias is None else one.bias.detach() for one in linears]
        self._bias[: self.out_features] = torch.cat(biases)

    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.itemsize

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the packed weight, (panels, lines, 16) int32, and the bias, (16 * panels,) float32."""
        return self._weight, self._bias

    def forward(self, x: Tensor, outputs: range | None = None) -> Tensor:
        """Return the outputs of the rows x, (..., outputs).

        Args:
            outputs: the outputs to compute, whose bounds are multiples of 16; None for all.
        """
        outputs = outputs or range(self.out_features)
        return _product(x, self.in_features, len(outputs), partial(self._multiply_part, outputs.start // PANEL))

    def _multiply_part(self, first: int, tiles: Tensor, out: Tensor, num_rows: int, panels: range) -> None:
        """Multiply the rows by some panels.

        Args:
            first: panel of the first output.
            panels: panels to multiply by, counted from `first`.
        """
        self._multiply(
            tiles.data_ptr(),
            self._weight[first:].data_ptr(),
            self._bias[PANEL * first :].data_ptr(),
            out.data_ptr(),
            num_rows,
            self._weight.shape[1],
            panels.start,
            panels.stop,
            out.shape[1],
            False,
        )


# Multiplies the rows in tiles by some panels of a weight: tiles, outputs (rows, width), number of rows, panels.
_Multiply = Callable[[Tensor, Tensor, int, range], None]


def _product(x: Tensor, inputs: int, outputs: int, multiply: _Multiply) -> Tensor:
    """Return the outputs of all rows of x (..., inputs), which the threads divide."""
    from sarathi_pp_kernels.cpu import gemm  # numba is optional

    assert x.dtype == torch.float32, f"packed for float32, called with {x.dtype}"
    rows = x.reshape(-1, inputs).contiguous()
    num_rows = rows.shape[0]
    out = torch.empty(gemm.padded_rows(num_rows), _padded(outputs))
    if num_rows:
        tiles = scratch_of_thread(out.shape[0] * inputs)
        gemm.lay_out(rows.data_ptr(), tiles.data_ptr(), num_rows, inputs, False, 0, 1)
        pieces = split_range(out.shape[1] // PANEL, gemm.PANELS)
        run_parallel([partial(multiply, tiles, out, num_rows, piece) for piece in pieces])
    return out[:num_rows, :outputs].view(*x.shape[:-1], outputs)


class _Kernels(NamedTuple):
    """The products of float32 rows with weights of one type: packed ones, and those that are not."""

    packed: Any
    unpacked: Any


def _kernels(held: torch.dtype) -> _Kernels:
    from sarathi_pp_kernels.cpu import gemm  # numba is optional

    return {
        torch.float32: _Kernels(gemm.multiply_float, gemm.multiply_unpacked_float),
        torch.bfloat16: _Kernels(gemm.multiply_float_bf16, gemm.multiply_unpacked_bf16),
        torch.float16: _Kernels(gemm.multiply_float_fp16, gemm.multiply_unpacked_fp16),
    }[held]


def _held_type(inputs: int, *weights: Tensor) -> torch.dtype:
    """Return the type in which the product reads weights. Those of 16 bits are read in pairs of inputs."""
    (first, *others) = {weight.dtype for weight in weights}
    return first if first in NARROW and not others and inputs % 2 == 0 else torch.float32


def _inputs_per_line(held: torch.dtype) -> int:
    return 2 if held in NARROW else 1


def _padded(outputs: int) -> int:
    """Return a number of outputs that fills whole panels. The last ones have weights of 0."""
    return -(-outputs // PANEL) * PANEL


def pack(weights: list[Tensor], packed: Tensor, held: torch.dtype, *, frees: bool = False) -> None:
    """Write weights (N, K), one below the other, in the order that gemm.py reads.

    Args:
        packed: (panels, lines, 16) int32.
        held: type of the numbers in the lines.
        frees: give back the memory of each weight when it is packed.
    """
    if any(len(weight) % PANEL for weight in weights[:-1]):
        weights = [torch.cat(weights)]
    first = 0
    for weight in weights:
        words = weight.to(held).contiguous().view(torch.int32)
        whole = len(words) // PANEL
        _write_panels(words[: whole * PANEL], packed[first : first + whole])
        first += whole
        if len(words) % PANEL:
            padded = functional.pad(words[whole * PANEL :], (0, 0, 0, -len(words) % PANEL))
            _write_panels(padded, packed[first : first + 1])
            first += 1
        if frees:
            release(weight)


def _write_panels(words: Tensor, packed: Tensor) -> None:
    packed.copy_(words.view(len(packed), PANEL, packed.shape[1]).permute(0, 2, 1))
