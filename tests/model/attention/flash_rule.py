"""The paged keys and values that FlashAttention-2 libraries accept, and the results they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PAGE = 256


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_keys: Tensor,
    table: Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return one sequence's (n, H, D) outputs of its last rows, and their (n, H) log-sum-exps.

    Reads no page after the last key.
    """
    count, end = query.shape[0], int(num_keys)
    held = table[: -(-end // PAGE)].long()
    key, value = (
        pool[held].reshape(-1, *pool.shape[2:])[:end].double().repeat_interleave(query.shape[1] // pool.shape[2], 1)
        for pool in (keys, values)
    )
    scores = torch.einsum("thd,khd->htk", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(end)[None] - torch.arange(end - count, end)[:, None]
    left, right = window
    hidden = ahead > right if right >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("htk,khd->thd", scores.softmax(-1), value)
    return out.to(query.dtype), scores.logsumexp(-1).t().float()


def attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, num_keys: Tensor, table: Tensor, **how: Any
) -> list[tuple[Tensor, Tensor]]:
    """Run `attend` for each sequence; `bounds` are the bounds of its rows."""
    rows = [query[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    return [attend(part, keys, values, num_keys[i], table[i], **how) for i, part in enumerate(rows)]


def check_pool(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, count: int) -> None:
    assert keys.shape == values.shape and keys.shape[1] % PAGE == 0, "page size is a multiple of 256"
    assert keys.stride(-1) == values.stride(-1) == query.stride(-1) == 1, "channels lie side by side"
    assert query.dtype == keys.dtype == values.dtype and query.dtype in (torch.float16, torch.bfloat16)
    assert table.dtype == torch.int32 and table.shape[0] == count and table.stride(-1) == 1
    assert 0 <= int(table.min()) and int(table.max()) < keys.shape[0], "every entry is a page, read or not"
