"""What one microbatch needs on a stage besides the activations: where its rows come from and go to.

Rows are the tokens of all spans, one after the other. A span of a prompt chunk has many rows, a decode one:

    spans    [s3 256..260)        [s1 300]  [s2 17]        start, num_tokens
    rows      0   1   2   3        4         5             T = 6
    position  256 257 258 259      300       17
    pages     table(s3)[pos // page_size] ...              where K and V of the row are written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + num_tokens) of one sequence, and the pages that hold [0, start + num_tokens).

    pages: the sequence's page table so far, first page first; it may be longer than needed. Anything with the
    buffer protocol (`array("q")`, numpy) is read several times faster than a list.
    """

    start: int
    num_tokens: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class SpanRows:
    """One span as the attention backends see it: its rows are [first_row, first_row + num_tokens).

    pages: (n,) int64, exactly the ceil(end / page_size) pages that hold keys [0, end). first_page: where they begin in
    those of the microbatch.
    """

    start: int
    num_tokens: int
    first_row: int
    pages: Tensor
    first_page: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StageInputs:
    """One microbatch of T rows for one stage; the same on every stage, built once and read by every layer.

    position_ids: (T,) int64, index of each row's token in its sequence.
    write_pages, write_offsets: (T,) int64, page and place in the page for each row's K and V.
    logit_rows: (n,) int64, rows whose logits are wanted.
    pages: (n,) int64, the spans' pages one after the other.
    """

    position_ids: Tensor
    write_pages: Tensor
    write_offsets: Tensor
    logit_rows: Tensor
    spans: tuple[SpanRows, ...]
    pages: Tensor

    @property
    def num_tokens(self) -> int:
        return self.position_ids.shape[0]


def build_inputs(spans: Sequence[Span], logit_rows: Sequence[int], page_size: int, device: torch.device) -> StageInputs:
    """All index tensors of one microbatch, vectorised over rows and moved to the device in one copy.

    A span whose pages do not reach its last token is a bug of the caller and asserts: it would otherwise
    write into a neighbour's pages.
    """
    laid = _Layout.of(spans, page_size)
    parts = [laid.positions, laid.write_pages, laid.write_offsets, np.asarray(logit_rows, np.int64), laid.pages]
    packed = on_device(torch.from_numpy(np.concatenate(parts)), device)
    positions, pages, offsets, logits, page_ids = torch.split_with_sizes(packed, [len(part) for part in parts])
    return StageInputs(positions, pages, offsets, logits, laid.rows(spans, page_ids), page_ids)


class FixedInputs:
    """Inputs of one microbatch after the other at the same addresses, as a captured graph reads them.

    num_tokens, num_logit_rows: of the graph. A microbatch that has fewer is filled up with rows at position 0, written
    to the spare page, and with logits of row 0. token_ids: (num_tokens,) int64, for a stage that embeds.
    """

    def __init__(
        self, num_tokens: int, num_logit_rows: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self._page_size = page_size
        self._spare_page = num_pages
        self._sizes = [num_tokens, num_tokens, num_tokens, num_tokens, num_logit_rows, num_pages]
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.token_ids, positions, pages, offsets, logits, page_ids = torch.split_with_sizes(self._packed, self._sizes)
        self.inputs = StageInputs(positions, pages, offsets, logits, (), page_ids)

    def load(self, spans: Sequence[Span], logit_rows: Sequence[int], token_ids: Sequence[int]) -> StageInputs:
        """Put a microbatch in the place of the one before, when the device comes to it; its own inputs, there."""
        laid = _Layout.of(spans, self._page_size)
        num_tokens, num_logit_rows = self._sizes[0], self._sizes[4]
        parts = [
            _filled(np.asarray(token_ids, np.int64), num_tokens),
            _filled(laid.positions, num_tokens),
            _filled(laid.write_pages, num_tokens, self._spare_page),
            _filled(laid.write_offsets, num_tokens),
            _filled(np.asarray(logit_rows, np.int64), num_logit_rows),
            laid.pages,
        ]
        packed = pinned(torch.from_numpy(np.concatenate(parts)), self._packed.device)
        self._packed[: len(packed)].copy_(packed, non_blocking=True)
        return replace(self.inputs, spans=laid.rows(spans, self.inputs.pages[: len(laid.pages)]))


def _filled(numbers: np.ndarray, length: int, number: int = 0) -> np.ndarray:
    return np.pad(numbers, (0, length - len(numbers)), constant_values=number)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the rows of some spans go. positions, write_pages, write_offsets: of each row; pages: see StageInputs;
    used: pages of each span.
    """

    positions: np.ndarray
    write_pages: np.ndarray
    write_offsets: np.ndarray
    pages: np.ndarray
    used: np.ndarray

    @classmethod
    def of(cls, spans: Sequence[Span], page_size: int) -> _Layout:
        starts = np.array([span.start for span in spans], dtype=np.int64)
        counts = np.array([span.num_tokens for span in spans], dtype=np.int64)
        tables = [np.asarray(span.pages, dtype=np.int64) for span in spans]
        used = (starts + counts + page_size - 1) // page_size
        for span, table, needed in zip(spans, tables, used.tolist(), strict=True):
            assert span.num_tokens > 0 and span.start >= 0, f"span {span.start}+{span.num_tokens} has no tokens"
            assert len(table) >= needed, f"{span.start}+{span.num_tokens} needs {needed} pages, has {len(table)}"
        pages = np.concatenate([table[:needed] for table, needed in zip(tables, used, strict=True)])
        first_rows = np.cumsum(counts) - counts
        first_pages = np.cumsum(used) - used
        positions = np.arange(int(counts.sum())) + np.repeat(starts - first_rows, counts)
        page_index, write_offsets = np.divmod(positions, page_size)
        return cls(positions, pages[page_index + np.repeat(first_pages, counts)], write_offsets, pages, used)

    def rows(self, spans: Sequence[Span], page_ids: Tensor) -> tuple[SpanRows, ...]:
        """page_ids: the pages, on the device."""
        made: list[SpanRows] = []
        first_row = first_page = 0
        for span, table in zip(spans, torch.split_with_sizes(page_ids, self.used.tolist()), strict=True):
            made.append(SpanRows(span.start, span.num_tokens, first_row, table, first_page))
            first_row += span.num_tokens
            first_page += table.shape[0]
        return tuple(made)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of what lies in the host's memory, which the device makes when it comes to it; the program goes on."""
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """In memory from which a device copies by itself; copies from other memory wait for what it was given before."""
    return host if device.type == "cpu" else host.pin_memory()
