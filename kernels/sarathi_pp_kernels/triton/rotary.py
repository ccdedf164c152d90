"""The steps between the products for query, key and value and the attention scores, in one kernel.

Query and key heads are normalised and get their rotary embedding. Keys and values are written to their pages. A program
(a unit of the kernel's work) computes one KV head of one row (token): the query heads that share it, its key and its
value. A head is held as two halves, because rotation mixes channel i with channel i + head_dim / 2:

    a row of the product    q0 q1 q2 q3 | k0 k1 | v0 v1          4 query heads, 2 KV heads
    program (row, 1)              q2 q3      k1      v1

Every value is rounded to the dtype at the points at which transformers' own modules round. These are after the norm,
after its weight, after either product of the rotation and after their sum. Pages in FP8 get the result rounded once
more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sarathi_pp_kernels.triton.float8 import to_codes


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_pages: Tensor,
    write_offsets: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Rotate the queries in place, write rotated keys, and values, into their pages, and return queries (T, H, D).

    All tensors have one dtype except the indices. Keys and values may be in float8_e4m3fn instead.

    Args:
        qkv: (T, (H + 2 Hkv) * D), contiguous.
        cos: (T, D), the cosines of the rotary embedding.
        sin: (T, D).
        write_pages: (T,) int64, id of the page to which each row's key and value are written.
        write_offsets: (T,) int64, index of the row's token within that page.
        keys: (num_pages, Hkv, page_size, D).
        values: like keys.
        query_norm: (D,), weights of an RMSNorm of each head before it is rotated. Both norms or none are given.
        key_norm: like query_norm.
    """
    num_rows, width = qkv.shape
    _, num_kv_heads, page_size, head_dim = keys.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    # The kernel takes addresses and would not notice wrong shapes.
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and num_heads % num_kv_heads == 0, (
        f"{width} columns are not heads of {head_dim} with {num_kv_heads} KV heads"
    )
    assert cos.shape == sin.shape == (num_rows, head_dim), f"{cos.shape}, {sin.shape} for {num_rows} x {head_dim}"
    assert write_pages.shape == write_offsets.shape == (num_rows,), f"{write_pages.shape}, {write_offsets.shape}"
    assert keys.shape == values.shape and head_dim % 2 == 0
    assert (query_norm is None) == (key_norm is None), "norms come in pairs"
    if keys.dtype == values.dtype == torch.float8_e4m3fn:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    else:
        assert keys.dtype == values.dtype == qkv.dtype, f"{keys.dtype}, {values.dtype}, {qkv.dtype}"
    assert keys.is_contiguous() and values.is_contiguous()
    floats = [one for one in (qkv, cos, sin, query_norm, key_norm) if one is not None]
    assert all(one.dtype == qkv.dtype and one.is_contiguous() for one in floats), [one.dtype for one in floats]
    group = num_heads // num_kv_heads
    if num_rows:
        _rotate_rows[(num_rows, num_kv_heads)](
            qkv,
            cos,
            sin,
            write_pages,
            write_offsets,
            keys,
            values,
            query_norm,
            key_norm,
            epsilon,
            num_kv_heads,
            page_size,
            GROUP=group,
            BLOCK_GROUP=triton.next_power_of_2(group),
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=1 if group * head_dim <= 512 else 4,
            enable_fp_fusion=False,  # transformers rounds a product before it is added
        )
    return qkv.view(num_rows, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]


def reference_rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_pages: Tensor,
    write_offsets: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Compute what `rotate_and_write` computes, in plain torch."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = torch.split_with_sizes(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    query.copy_(_reference_head(query, query_norm, cos, sin, epsilon))
    _put(keys, _reference_head(key, key_norm, cos, sin, epsilon), write_pages, write_offsets)
    _put(values, value, write_pages, write_offsets)
    return query


def _put(pages: Tensor, rows: Tensor, write_pages: Tensor, write_offsets: Tensor) -> None:
    if pages.dtype == torch.float8_e4m3fn:
        bounded = rows.clamp(-448, 448).masked_fill(rows.isinf(), torch.nan).copysign(rows)
        rows, pages = bounded.to(pages.dtype).view(torch.uint8), pages.view(torch.uint8)
    pages[write_pages, :, write_offsets] = rows


def _reference_head(heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, epsilon: float) -> Tensor:
    if norm is not None:
        wide = heads.float()
        heads = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(heads.dtype)
    low, high = heads.chunk(2, dim=-1)
    rotated: Tensor = heads * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return rotated


# write_pages and write_offsets are parts of one tensor. Where they start depends on the number of rows. Triton would
# compile another kernel for each alignment of these starts.
@triton.jit(do_not_specialize_on_alignment=["write_pages", "write_offsets"])
def _rotate_rows(  # type: ignore[no-untyped-def]
    qkv, cos, sin, write_pages, write_offsets, keys, values, query_norm, key_norm, epsilon, num_kv_heads, page_size,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = 2 * HALF
    begin = qkv + row * num_kv_heads * (GROUP + 2) * size
    page, offset = tl.load(write_pages + row), tl.load(write_offsets + row)
    place = ((page * num_kv_heads + kv_head) * page_size + offset) * size

    member, at = tl.arange(0, BLOCK_GROUP)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    one, group = at < HALF, (member < GROUP) & (at < HALF)
    query = begin + (kv_head * GROUP + member) * size + at
    _rotate_heads(query, query, group, at, cos + row * size, sin + row * size, query_norm, epsilon, HALF)
    key = begin + (num_kv_heads * GROUP + kv_head) * size + at
    _rotate_heads(key, keys + place + at, one, at, cos + row * size, sin + row * size, key_norm, epsilon, HALF)
    value = key + num_kv_heads * size
    _store(values + place + at, tl.load(value, mask=one), one)
    _store(values + place + at + HALF, tl.load(value + HALF, mask=one), one)


@triton.jit
def _rotate_heads(source, to, inside, at, cos, sin, norm, epsilon, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalise the heads at `source` if `norm` is given, rotate them, and write them to `to`.

    Args:
        source: addresses of the lower halves of the heads.
        inside: mask of the heads and channels that exist.
        at: indices of the channels within a half.
        norm: weights of the RMSNorm; None for none.
    """
    dtype = source.dtype.element_ty
    channel = at < HALF
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
        low_gain = tl.load(norm + at, mask=channel, other=0.0).to(tl.float32)
        high_gain = tl.load(norm + HALF + at, mask=channel, other=0.0).to(tl.float32)
        low = _rounded(_rounded(low * inverse, dtype) * low_gain, dtype)
        high = _rounded(_rounded(high * inverse, dtype) * high_gain, dtype)
    low_cos = tl.load(cos + at, mask=channel, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + at, mask=channel, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + HALF + at, mask=channel, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + HALF + at, mask=channel, other=0.0).to(tl.float32)
    first = _rounded(low * low_cos, dtype) - _rounded(high * low_sin, dtype)
    second = _rounded(high * high_cos, dtype) + _rounded(low * high_sin, dtype)
    _store(to, first.to(dtype), inside)
    _store(to + HALF, second.to(dtype), inside)


@triton.jit
def _store(to, x, inside):  # type: ignore[no-untyped-def]
    """Write x to its addresses. The codes of FP8 are uint8."""
    if to.dtype.element_ty == tl.uint8:
        tl.store(to, to_codes(x.to(tl.float32)), mask=inside)
    else:
        tl.store(to, x, mask=inside)


@triton.jit
def _rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return x.to(dtype).to(tl.float32)
