"""The operations of layers with a state in torch, for every device and dtype. They are the reference of the kernels.

Spans of one row, which are decodes, are computed as one batch with gathered states. A longer span takes the form that
transformers has for prompts: chunks of 64 rows as matrix products, with the state between chunks. Row by row, each
token would take a dozen small operations. So the result of a row depends a little on how its prompt was cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from sarathi_pp.model.inputs import SpanRows, StageInputs
from sarathi_pp.model.state.backend import Convolution, DeltaRule, SelectiveScan

# Rows that `_scan_chunk` computes as matrix products at a time.
_CHUNK = 64
# transformers' functions themselves, not those of a package that it would call instead.
_CHUNK_RULE: Callable[..., Any] = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)
_ROW_RULE: Callable[..., Any] = inspect.unwrap(qwen3_next.torch_recurrent_gated_delta_rule)


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans that are computed together: n spans of one row, or one span of several rows.

    Attributes:
        rows: (n * count,) int64, indices of the rows, or a slice of the rows of one span.
        slots: (n,) int64.
        is_first: (n,) bool: the span starts at position 0.
    """

    rows: Tensor | slice
    slots: Tensor
    is_first: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of (T, ...), as (n, count, ...)."""
        rows = x[self.rows]
        return rows.reshape(len(self.slots), -1, rows.shape[1])

    def read(self, states: Tensor) -> Tensor:
        """Return the states of the spans, zeros for those that start at position 0."""
        zero = torch.zeros((), dtype=states.dtype, device=states.device)
        return torch.where(self.is_first.view(-1, *[1] * (states.dim() - 1)), zero, states[self.slots])


class TorchState:
    """The operations in torch. See StateBackend."""

    name = "torch"

    def __init__(self) -> None:
        self._grouped: tuple[StageInputs, tuple[_Group, ...]] | None = None

    def convolve(self, x: Tensor, conv: Convolution, latest: Tensor, inputs: StageInputs) -> Tensor:
        """See StateBackend. Sums are float32, and are rounded before SiLU."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for group in self._groups(inputs):
            window = torch.cat([group.read(latest), group.take(x)], dim=1)
            count = window.shape[1] - conv.taps + 1
            total = conv.bias.expand(len(group.slots), count, -1)
            for tap, weight in enumerate(conv.weights):
                total = total + window[:, tap : tap + count].float() * weight
            made = total.to(x.dtype)
            out[group.rows] = (functional.silu(made) if conv.silu else made).flatten(0, 1)
            latest[group.slots] = window[:, count:]
        return out

    def apply_delta_rule(
        self, rows: Tensor, gates: Tensor, rule: DeltaRule, states: Tensor, inputs: StageInputs
    ) -> Tensor:
        """See StateBackend."""
        out = torch.empty(len(rows), rule.value_heads, rule.value_dim, dtype=rows.dtype, device=rows.device)
        keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
        repeats = rule.value_heads // rule.key_heads
        for group in self._groups(inputs):
            query, key, value = torch.split_with_sizes(group.take(rows), [keys, keys, values], dim=-1)
            query, key = (_by_head(one, rule.key_heads).repeat_interleave(repeats, dim=2) for one in (query, key))
            beta, logits = group.take(gates).chunk(2, dim=-1)
            by_rows = query.shape[1] == 1
            made, after = (_ROW_RULE if by_rows else _CHUNK_RULE)(
                query,
                key,
                _by_head(value, rule.value_heads),
                g=rule.rates * functional.softplus(logits.float() + rule.gate_bias),
                beta=beta.sigmoid(),
                initial_state=_in_heads(group.read(states), rule.value_heads),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            out[group.rows] = made.flatten(0, 1)
            states[group.slots] = _in_blocks(after, states)
        return out

    def scan(self, rows: Tensor, steps: Tensor, scan: SelectiveScan, states: Tensor, inputs: StageInputs) -> Tensor:
        """See StateBackend. The steps dt have the dtype of the rows, and all else is float32."""
        out = torch.empty(len(rows), scan.heads, scan.head_dim, device=rows.device)
        width, shared = scan.heads * scan.head_dim, scan.groups * scan.state_dim
        for group in self._groups(inputs):
            x, key, query = torch.split_with_sizes(group.take(rows).float(), [width, shared, shared], dim=-1)
            x, repeats = _by_head(x, scan.heads), scan.heads // scan.groups
            key, query = (_by_head(one, scan.groups).repeat_interleave(repeats, dim=2) for one in (key, query))
            logits = group.take(steps)
            dt = functional.softplus(logits + scan.step_bias.to(logits.dtype)).float()
            state = _in_heads(group.read(states), scan.heads)
            made = []
            for at in range(0, x.shape[1], _CHUNK):
                part = slice(at, at + _CHUNK)
                y, state = _scan_chunk(x[:, part], dt[:, part], key[:, part], query[:, part], scan.rates, state)
                made.append(y)
            out[group.rows] = (torch.cat(made, dim=1) + scan.skips[:, None] * x).flatten(0, 1)
            states[group.slots] = _in_blocks(state, states)
        return out

    def _groups(self, inputs: StageInputs) -> tuple[_Group, ...]:
        """Return the groups of a microbatch's spans. They are kept, because all layers need the same ones."""
        if self._grouped is None or self._grouped[0] is not inputs:
            num_rows = sum(span.num_tokens for span in inputs.spans)
            assert num_rows == inputs.num_tokens, f"spans have {num_rows} of {inputs.num_tokens} rows"
            self._grouped = inputs, tuple(_grouped(inputs.spans, inputs.position_ids.device))
        return self._grouped[1]


def _grouped(spans: tuple[SpanRows, ...], device: torch.device) -> Iterator[_Group]:
    """Yield the groups of spans, in an order in which no span of a sequence comes before an earlier one."""
    alone = len({span.slot for span in spans}) == len(spans)
    lone_rows = [span for span in spans if alone and span.num_tokens == 1]
    for some in (lone_rows, *([span] for span in spans if not alone or span.num_tokens > 1)):
        if not some:
            continue
        assert all(span.slot >= 0 for span in some), "a span without a state slot"
        table = [[span.first_row for span in some], [span.slot for span in some], [span.start == 0 for span in some]]
        rows, slots, is_first = torch.tensor(table, device=device)
        first = some[0].first_row
        yield _Group(rows if len(some) > 1 else slice(first, first + some[0].num_tokens), slots, is_first.bool())


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return (n, count, channels) as (n, count, heads, channels of a head)."""
    return x.reshape(*x.shape[:2], heads, -1)


def _in_heads(blocks: Tensor, heads: int) -> Tensor:
    """Return blocks (n, blocks, rows, columns) as states of heads (n, heads, rows, channels)."""
    number, all_blocks, rows, columns = blocks.shape
    return blocks.view(number, heads, all_blocks // heads, rows, columns).transpose(2, 3).flatten(3)


def _in_blocks(states: Tensor, blocks: Tensor) -> Tensor:
    """Return states of heads, see `_in_heads`, in the layout of `blocks`."""
    number, heads, rows, _ = states.shape
    return states.reshape(number, heads, rows, -1, blocks.shape[-1]).transpose(2, 3).flatten(1, 2)


def _scan_chunk(
    x: Tensor, dt: Tensor, key: Tensor, query: Tensor, rates: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute some rows of a selective scan as matrix products (arXiv 2405.21060, section 6).

    Args:
        x: (n, count, heads, head_dim) float32.
        dt: (n, count, heads) float32.
        key: (n, count, heads, state_dim) float32, as query is.
        state: (n, heads, state_dim, head_dim), before the first row.

    Returns:
        The outputs (n, count, heads, head_dim), and the state after the last row.
    """
    decay = (rates * dt).cumsum(dim=1)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    pairs = (decay[:, :, None] - decay[:, None]).masked_fill(later[:, :, None], -torch.inf).exp()
    scores = torch.einsum("nthd,nshd->ntsh", query, key) * pairs
    added = x * dt[..., None]
    of_state = torch.einsum("nthd,nhdc->nthc", query, state) * decay.exp()[..., None]
    kept = key * (decay[:, -1:] - decay).exp()[..., None]
    after = decay[:, -1].exp()[..., None, None] * state + torch.einsum("nshd,nshc->nhdc", kept, added)
    return torch.einsum("ntsh,nshc->nthc", scores, added) + of_state, after
