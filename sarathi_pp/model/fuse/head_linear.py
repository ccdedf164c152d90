"""Linear layers of attention heads: each head multiplies its own rows with its own weight."""

from __future__ import annotations

from functools import partial

import torch
from sarathi_pp_kernels.cpu.huge_pages import empty_in_large_pages
from sarathi_pp_kernels.cpu.threads import run_parallel, scratch_of_thread, split_range
from torch import Tensor, nn
from torch.nn import functional

from sarathi_pp.model.fuse.float_linear import NARROW, PANEL, has_float_gemm, pack
from sarathi_pp.model.fuse.packed_linear import has_gemm


def head_linear(weight: Tensor, compute: torch.dtype) -> HeadLinear | PackedHeadLinear:
    """Return the layer for a weight (H, N, K) of H heads, by our own product if it computes this type here.

    Args:
        compute: float type of the rows. On CPU, the weight may have a narrower one.
    """
    own = {torch.float32: has_float_gemm, torch.bfloat16: has_gemm}.get(compute)
    in_pairs = weight.dtype in NARROW
    fits = weight.dtype == compute or (compute == torch.float32 and in_pairs)
    if weight.is_cpu and own is not None and own() and fits and not (in_pairs and weight.shape[-1] % 2):
        return PackedHeadLinear(weight, compute)
    return HeadLinear(weight.to(compute))


class HeadLinear(nn.Module):
    """x (T, H, K) and weight (H, N, K) to (T, H, N), by torch's product."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.is_cpu:
            # One by one: a product of two matrices has the same bits for any number of rows (batch_invariant.py).
            heads = [functional.linear(rows, weight) for rows, weight in zip(x.unbind(1), self.weight, strict=True)]
            return torch.stack(heads, 1)
        return torch.bmm(x.transpose(0, 1), self.weight.mT).transpose(0, 1)


class PackedHeadLinear(nn.Module):
    """x (T, H, K) and weight (H, N, K) to (T, H, N), by our own product (head_products.py), with a packed weight.

    A row's result depends on nothing but the row. The heads are divided among torch's number of threads.

    Attributes:
        held_type: type of the weight in memory.
    """

    def __init__(self, weight: Tensor, compute: torch.dtype) -> None:
        super().__init__()
        from sarathi_pp_kernels.cpu.head_products import MULTIPLY_HEADS  # numba is optional
        from sarathi_pp_kernels.cpu.simd.products import BF16, FLOAT32, FLOAT32_BF16, FLOAT32_FP16

        kinds = {torch.float32: FLOAT32, torch.bfloat16: FLOAT32_BF16, torch.float16: FLOAT32_FP16}
        self._multiply = MULTIPLY_HEADS[BF16 if compute == torch.bfloat16 else kinds[weight.dtype]]
        self.held_type, self._dtype = weight.dtype, compute
        self.num_heads, self.out_features, self.in_features = weight.shape
        self._panels = -(-self.out_features // PANEL)
        padded = functional.pad(weight.detach(), (0, 0, 0, self._panels * PANEL - self.out_features))
        lines = self.in_features // (2 if weight.dtype in NARROW else 1)
        # Neither weight nor bias is a buffer, because a packed weight can be neither moved nor saved.
        self._weight = empty_in_large_pages((self.num_heads * self._panels, lines, PANEL), torch.int32)
        pack([padded.reshape(-1, self.in_features)], self._weight, weight.dtype)
        self._bias = torch.zeros(self._panels * PANEL)

    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.itemsize

    def forward(self, x: Tensor) -> Tensor:
        from sarathi_pp_kernels.cpu.gemm import padded_rows

        num_rows = x.shape[0]
        assert x.dtype == self._dtype and x.shape[1:] == (self.num_heads, self.in_features), (x.dtype, x.shape)
        per_word = 4 // x.itemsize
        if x.stride(2) != 1 or any(step % per_word for step in (x.stride(0), x.stride(1), x.storage_offset())):
            x = x.contiguous()
        out = x.new_empty(padded_rows(num_rows), self.num_heads, self._panels * PANEL)
        if num_rows:
            run_parallel([partial(self._multiply_heads, x, out, heads) for heads in split_range(self.num_heads)])
        return out[:num_rows, :, : self.out_features]

    def _multiply_heads(self, x: Tensor, out: Tensor, heads: range) -> None:
        per_word = 4 // x.itemsize
        self._multiply(
            x.data_ptr(),
            x.stride(0) // per_word,
            x.stride(1) // per_word,
            scratch_of_thread(out.shape[0] * self.in_features // per_word).data_ptr(),
            self._weight.data_ptr(),
            self._bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            self._weight.shape[1],
            self._panels,
            self.num_heads,
            heads.start,
            heads.stop,
        )
