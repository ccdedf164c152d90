"""Linear layers in bfloat16 on CPU, with weights packed once in the layout that a matrix product (GEMM) reads.

A plain linear layer repacks its weight in every call. That doubles the time of a product with few rows, such as a
decode. Two products avoid it: our own (gemm.py), if numba and the processor allow it, and oneDNN's.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from sarathi_pp_kernels.cpu.huge_pages import empty_in_large_pages, release
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range
from torch import Tensor, nn
from torch.nn import functional

from sarathi_pp.model.dtypes import has_bf16_products
from sarathi_pp.model.fuse.float_linear import FloatLinear, has_float_gemm

# oneDNN builds kernels for each new number of rows, in 10 to 20 ms per shape of weights. It takes up to 40 % longer if
# the number is no multiple of 16. So rows are multiplied in blocks of 256, for which a packed layout is tuned as well.
# The last block is padded to a multiple of the step, so there are at most 16 different numbers of rows.
_BLOCK_ROWS = 256
_ROW_STEP = 16

# gemm.py multiplies rows in high or in wide tiles. The two are timed at these numbers of rows, _TIMES times each, on
# layers of _TIMED_BYTES in total. That is enough that weights come from memory and not from a cache, and large
# models take no longer than others. One layer of each shape is chosen if it fits, before a second one of any shape,
# small ones first. With more than _READING_ROWS rows, computing takes longer than reading, so fewer bytes are enough.
_TIMED_ROWS = (4, 8, 16, 28, 56, 112)
_TIMES = 3
_TIMED_BYTES = 64 * 2**20
_READING_ROWS = 16


def packed_class(
    linear: nn.Linear, compute: torch.dtype | None = None
) -> type[PackedLinear] | type[OneDnnLinear] | type[FloatLinear] | None:
    """Return the class that packs a linear layer, or None if no class can.

    Args:
        compute: float type of the computation. The weight may have a narrower one. None: the type of the weight.
    """
    compute = compute or linear.weight.dtype
    if linear.weight.device.type != "cpu" or compute not in (torch.bfloat16, torch.float32):
        return None
    if compute == torch.float32:
        return FloatLinear if has_float_gemm() else None
    if fits_gemm(linear):
        return PackedLinear
    return OneDnnLinear if has_onednn() else None


def product_name(compute: torch.dtype, device: torch.device) -> str:
    """Return the name of what computes linear layers in a float type on a device, for the user."""
    if device.type != "cpu":
        return "torch"
    if compute == torch.float32:
        return "numba" if has_float_gemm() else "torch"
    if compute == torch.bfloat16 and has_gemm():
        return "numba"
    return "oneDNN" if compute == torch.bfloat16 and has_onednn() else "torch"


def fits_gemm(linear: nn.Linear) -> bool:
    """Return whether our own matrix product (gemm.py) can compute this layer on this machine."""
    bf16 = linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu"
    return bf16 and linear.in_features % 2 == 0 and linear.out_features % 16 == 0 and has_gemm()


def warm_linears(module: nn.Module, most_rows: int, now: Callable[[], float]) -> None:
    """Prepare the linear layers for microbatches of up to most_rows rows.

    oneDNN builds its kernels, and the faster tiles are chosen for our own product. Otherwise the first microbatches
    would wait for this.

    Args:
        module: a model whose linear layers may be OneDnnLinear or PackedLinear.
        now: returns the seconds of a clock, to time the tiles.
    """
    shapes = {
        (child.in_features, child.out_features, child.bias is None): child
        for child in module.modules()
        if isinstance(child, OneDnnLinear)
    }
    for rows in range(_ROW_STEP, min(most_rows + _ROW_STEP, _BLOCK_ROWS + 1), _ROW_STEP):
        for linear in shapes.values():
            linear(torch.zeros(rows, linear.in_features, dtype=torch.bfloat16))
    packed = [child for child in module.modules() if isinstance(child, PackedLinear)]
    whole = [child for child in packed if child.num_parts == 1]
    if whole:
        most_high_rows = _most_high_rows(whole, now)
        for child in packed:
            child.most_high_rows = most_high_rows


def _timed(linears: Sequence[PackedLinear], rows: int) -> list[PackedLinear]:
    """Return the layers on which tiles are timed with this number of rows. See _TIMED_BYTES."""
    left = _TIMED_BYTES * min(1.0, _READING_ROWS / rows)
    of_shape: Counter[tuple[int, int]] = Counter()
    turns = []
    for linear in linears:
        shape = linear.in_features, linear.out_features
        turns.append((of_shape[shape], linear.num_bytes()))
        of_shape[shape] += 1
    chosen: list[PackedLinear] = []
    for at in sorted(range(len(linears)), key=turns.__getitem__):
        if not chosen or linears[at].num_bytes() <= left:
            chosen.append(linears[at])
            left -= linears[at].num_bytes()
    return chosen


def _most_high_rows(linears: Sequence[PackedLinear], now: Callable[[], float]) -> int:
    """Return the number of rows up to which high tiles are faster than wide ones on this machine; 0 if they never are.

    Both kinds are timed at several numbers of rows. The bound with the least loss over all of them is taken. Each
    number counts equally, so one disturbed measurement does not decide.
    """
    losses: list[tuple[float, float]] = []  # times of high and of wide tiles, divided by the shorter one
    for rows in _TIMED_ROWS:
        timed = _timed(linears, rows)
        x = [torch.zeros(rows, linear.in_features, dtype=torch.bfloat16) for linear in timed]
        seconds = {most: math.inf for most in (rows, 0)}
        for most in (rows, 0) * _TIMES:
            begin_s = now()
            for linear, one in zip(timed, x, strict=True):
                linear.most_high_rows = most
                linear(one)
            seconds[most] = min(seconds[most], now() - begin_s)
        losses.append((seconds[rows] / min(seconds.values()), seconds[0] / min(seconds.values())))
    bounds = range(len(_TIMED_ROWS) + 1)
    best = min(bounds, key=lambda count: sum(h for h, _ in losses[:count]) + sum(w for _, w in losses[count:]))
    return (0, *_TIMED_ROWS)[best]


class PackedLinear(nn.Module):
    """A linear layer by our own product (gemm.py): x @ weight.T + bias for bfloat16 x (..., in_features).

    It sums in float32 and rounds once. Several linear layers with the same input become one layer, with their outputs
    next to each other. A row's result depends on nothing but the row. The outputs are divided among torch's number of
    threads.

    Args:
        linears: the layers to pack.
        frees: give back the memory of each weight when it is packed. Nothing may read it any more.

    Attributes:
        held_type: type of the weights in memory.
        num_parts: number of equal parts of the outputs. Each part is computed in a call of its own.
        most_high_rows: with up to this many rows, use gemm.py's high tiles; with more, its wide tiles. `warm_linears`
            measures the best number for this machine.
    """

    most_high_rows = 28
    num_parts = 1
    held_type = torch.bfloat16

    def __init__(self, *linears: nn.Linear, frees: bool = False) -> None:
        super().__init__()
        from sarathi_pp_kernels.cpu import gemm  # numba is optional

        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._padded_rows, self._lay_out, self._multiply = gemm.padded_rows, gemm.lay_out, gemm.multiply_bf16
        # Neither weight nor bias is a buffer, because a packed weight can be neither moved nor saved.
        self._weight = empty_in_large_pages(gemm.packed_shape(self.out_features, self.in_features), torch.int32)
        parts = torch.split(self._weight, [linear.out_features // 16 for linear in linears])
        for linear, part in zip(linears, parts, strict=True):
            part.copy_(pack_weight(linear.weight.detach()))
            if frees:
                release(linear.weight)
        self._bias = torch.cat(
            [
                torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()
                for linear in linears
            ]
        )

    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.itemsize

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the packed weight and the (out_features,) float32 bias."""
        return self._weight, self._bias

    def forward(self, x: Tensor, outputs: range | None = None) -> Tensor:
        """Return the outputs of the rows x, (..., outputs).

        Args:
            outputs: the outputs to compute, whose bounds are multiples of 16; None for all.
        """
        assert x.dtype == torch.bfloat16, f"packed for bfloat16, called with {x.dtype}"
        outputs = outputs or range(self.out_features)
        rows, words = x.reshape(-1, self.in_features).contiguous(), self.in_features // 2
        num_rows = rows.shape[0]
        out = torch.empty(self._padded_rows(num_rows), len(outputs), dtype=torch.bfloat16)
        if num_rows:
            tiles, high = scratch_of_thread(out.shape[0] * words), num_rows <= self.most_high_rows
            self._lay_out(rows.data_ptr(), tiles.data_ptr(), num_rows, words, high, 0, 1)
            first = outputs.start // 16
            pieces = split_range(len(outputs) // 16, 2)
            run_parallel([partial(self._multiply_part, tiles, out, num_rows, high, first, piece) for piece in pieces])
        return out[:num_rows].view(*x.shape[:-1], len(outputs))

    def _multiply_part(self, tiles: Tensor, out: Tensor, num_rows: int, high: bool, first: int, panels: range) -> None:
        """Multiply the rows by some panels.

        Args:
            first: panel of the first output.
            panels: panels to multiply by, counted from `first`.
        """
        self._multiply(
            tiles.data_ptr(),
            self._weight[first:].data_ptr(),
            self._bias[16 * first :].data_ptr(),
            out.data_ptr(),
            num_rows,
            self.in_features // 2,
            panels.start,
            panels.stop,
            out.shape[1],
            high,
        )


def pack_weight(weight: Tensor) -> Tensor:
    """Return an (N, K) bfloat16 weight in the order that gemm.py reads: (N / 16, K / 2, 16) int32, a strided view.

    N must be a multiple of 16, and K must be even.
    """
    outputs, inputs = weight.shape
    words = weight.contiguous().view(torch.int32).view(outputs // 16, 16, inputs // 2)
    return words.permute(0, 2, 1)


class OneDnnLinear(nn.Module):
    """A linear layer by oneDNN: x @ weight.T + bias for bfloat16 x (..., in_features), with the bits of nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # The packed weight is no buffer, because oneDNN's layout can be neither moved nor saved.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _BLOCK_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        blocks = [self._multiply(block) for block in torch.split(x.reshape(-1, self.in_features), _BLOCK_ROWS)]
        y = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return y.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Tensor) -> Tensor:
        """Multiply at most one block of rows.

        Args:
            x: (rows, in_features).
        """
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self.out_features)
        if num_rows % _ROW_STEP:
            x = functional.pad(x, (0, 0, 0, -num_rows % _ROW_STEP))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y[:num_rows]


@functools.cache
def has_gemm() -> bool:
    """Return whether our own matrix product in bfloat16 runs here. See `has_bf16_products`."""
    return has_bf16_products()


def has_onednn() -> bool:
    """Return whether oneDNN's product runs here. Its operators are not public, so a torch release may lack them."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    present = all(hasattr(torch.ops.mkldnn, name) for name in operators)
    return bool(present and torch.ops.mkldnn._is_mkldnn_bf16_supported())
