"""torch's own FlashAttention over pages, which no CPU runs: the operator that its varlen_attn calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.model.attention.flash_rule import attend_rows, check_pool


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window_size: list[int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute torch_attn::_varlen_attn: (T, H, D), (H, T) log-sum-exps, and the state of an unused dropout."""
    check_pool(query, key, value, block_table, len(seqused_k))
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32 and query.is_contiguous()
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(seqused_k.max())
    assert is_causal == (window_size == [-1, 0])
    how = {"scale": scale, "window": (window_size[0], window_size[1]), "softcap": 0.0}
    found = attend_rows(query, key, value, cu_seq_q, seqused_k, block_table, **how)
    out, logsumexp = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, logsumexp.t().contiguous(), torch.zeros(2, dtype=torch.uint64)
