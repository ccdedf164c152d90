"""Attention on a CUDA device by a library's FlashAttention-2: the package flash-attn, or the one built into torch.

Both read pages in place. They expect (num_pages, page_size, num_kv_heads, head_dim) with any strides. So the pages of
the KV shard, which have heads before tokens, are passed as transposed views. Page tables are made once per microbatch
and serve all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import SpanRows, StageInputs, on_device
from sarathi_pp.model.kv import KVShard

# Both libraries read pages in blocks, and the end of a page must not cut a block.
_PAGE_TOKENS = 256


class FlashAttention:
    """Attention by flash-attn: one call for chunks, and one for decodes, which splits long contexts over the device."""

    name = "flash"
    page_multiple = _PAGE_TOKENS
    default_page_size = _PAGE_TOKENS

    def __init__(self) -> None:
        import flash_attn  # optional

        self._library = flash_attn
        self._microbatch: _Microbatch | None = None

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """See AttentionBackend. The library has no sinks, so the output is reduced by the sinks' share afterwards."""
        if self._microbatch is None or self._microbatch.inputs is not inputs:
            self._microbatch = _Microbatch.of(inputs)
        keys, values = token_major(kv, layer)
        common = {
            "softmax_scale": spec.scaling,
            "causal": True,
            "window_size": (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
            "softcap": spec.softcap or 0.0,
        }
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        chunks, decodes = self._microbatch.chunks, self._microbatch.decodes
        if chunks is not None:
            found, logsumexp, _ = self._library.flash_attn_varlen_func(
                chunks.of_query(query),
                keys,
                values,
                cu_seqlens_q=chunks.row_bounds,
                cu_seqlens_k=chunks.key_bounds,
                max_seqlen_q=chunks.most_rows,
                max_seqlen_k=chunks.most_keys,
                block_table=chunks.table,
                return_attn_probs=True,
                **common,
            )
            chunks.put(out, found if spec.sinks is None else _weakened(found, logsumexp.t(), spec.sinks))
        if decodes is not None:
            found, logsumexp = self._library.flash_attn_with_kvcache(
                decodes.of_query(query)[:, None],
                keys,
                values,
                cache_seqlens=decodes.num_keys,
                block_table=decodes.table,
                return_softmax_lse=True,
                **common,
            )
            found = found[:, 0]
            decodes.put(out, found if spec.sinks is None else _weakened(found, logsumexp[:, :, 0], spec.sinks))
        return out


class VarlenAttention:
    """Attention by torch.nn.attention.varlen, which reads pages since torch 2.12: one call for chunks and decodes."""

    name = "varlen"
    page_multiple = _PAGE_TOKENS
    default_page_size = _PAGE_TOKENS

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn
        self._microbatch: _Rows | None = None
        self._inputs: StageInputs | None = None

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """See AttentionBackend."""
        assert spec.softcap is None and spec.sinks is None, "torch's varlen_attn has neither; choose_backend knows"
        if self._microbatch is None or self._inputs is not inputs:
            self._microbatch, self._inputs = _Rows.of(inputs, inputs.spans), inputs
        rows = self._microbatch
        keys, values = token_major(kv, layer)
        out = self._attend(
            query.contiguous(),
            keys,
            values,
            rows.row_bounds,
            rows.key_bounds,
            rows.most_rows,
            rows.most_keys,
            scale=spec.scaling,
            window_size=(-1 if spec.sliding_window is None else spec.sliding_window - 1, 0),
            enable_gqa=True,
            seqused_k=rows.num_keys,
            block_table=rows.table,
        )
        assert isinstance(out, Tensor), "nothing else was asked for"
        return out


def token_major(kv: KVShard, layer: int) -> tuple[Tensor, Tensor]:
    """Return a layer's key and value pages as views of (num_pages, page_size, num_kv_heads, head_dim)."""
    return kv.keys(layer).transpose(1, 2), kv.values(layer).transpose(1, 2)


def _weakened(out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Return the attention output with sinks, from the output and the softmax's log-sum-exp without sinks.

    A sink adds exp(sink) to the softmax's denominator exp(l). So the output is multiplied by exp(l) / (exp(l) +
    exp(sink)), which is sigmoid(l - sink).

    Args:
        out: (n, H, D).
        logsumexp: (n, H).
        sinks: (H,).
    """
    return out * torch.sigmoid(logsumexp - sinks.float())[:, :, None].to(out.dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Arguments for one call of the library: n sequences of a microbatch, as int32 tensors on the device.

    Attributes:
        row_bounds: (n + 1,), sums of the numbers of rows before each sequence, and of all.
        key_bounds: (n + 1,), sums of the numbers of keys before each sequence, and of all.
        num_keys: (n,), number of keys of each sequence.
        table: (n, most pages), page ids of each sequence.
        most_rows: number of rows of the longest chunk.
        most_keys: number of keys of the longest sequence.
        rows: indices of the sequences' rows in the microbatch; None if they are all rows.
    """

    row_bounds: Tensor
    key_bounds: Tensor
    num_keys: Tensor
    table: Tensor
    most_rows: int
    most_keys: int
    rows: Tensor | None

    @classmethod
    def of(cls, inputs: StageInputs, spans: Sequence[SpanRows]) -> _Rows:
        """Return the arguments for some spans, moved to the device in one copy.

        The page ids are on the device already and are gathered there.
        """
        counts = np.array([span.num_tokens for span in spans])
        ends = np.array([span.end for span in spans])
        held = np.array([span.num_pages for span in spans])
        first_pages = np.array([span.first_page for span in spans])
        # A table row that is longer than its sequence is filled with the last page, which is not read there.
        places = first_pages[:, None] + np.minimum(np.arange(held.max())[None, :], held[:, None] - 1)
        some = len(spans) < len(inputs.spans)
        rows = np.concatenate([np.arange(span.first_row, span.first_row + span.num_tokens) for span in spans])
        parts = [_bounds(counts), _bounds(ends), ends, places.reshape(-1), rows if some else rows[:0]]
        host = torch.from_numpy(np.concatenate(parts).astype(np.int32))
        device = inputs.pages.device
        row_bounds, key_bounds, num_keys, at, chosen = torch.split_with_sizes(
            on_device(host, device), [len(part) for part in parts]
        )
        table = inputs.pages[at].to(torch.int32).view(len(spans), -1)
        return cls(
            row_bounds,
            key_bounds,
            num_keys,
            table,
            int(counts.max()),
            int(ends.max()),
            chosen if some else None,
        )

    def of_query(self, query: Tensor) -> Tensor:
        return query.contiguous() if self.rows is None else query[self.rows]

    def put(self, out: Tensor, found: Tensor) -> None:
        if self.rows is None:
            out.copy_(found)
        else:
            out[self.rows] = found


def _bounds(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """The arguments for the calls that compute a microbatch, the same for all layers.

    Attributes:
        chunks: sequences of several tokens; None if there are none.
        decodes: sequences of one token; None if there are none.
    """

    inputs: StageInputs
    chunks: _Rows | None
    decodes: _Rows | None

    @classmethod
    def of(cls, inputs: StageInputs) -> _Microbatch:
        chunks = [span for span in inputs.spans if span.num_tokens > 1]
        decodes = [span for span in inputs.spans if span.num_tokens == 1]
        return cls(
            inputs,
            _Rows.of(inputs, chunks) if chunks else None,
            _Rows.of(inputs, decodes) if decodes else None,
        )
