"""The inputs of one microbatch on a stage, besides the activations: where its rows come from and where they go to.

Rows are the tokens of all spans, one after the other. The span of a prompt chunk has many rows, and that of a decode
has one:

    spans    [s3 256..260)        [s1 300]  [s2 17]        start, num_tokens
    rows      0   1   2   3        4         5             T = 6
    position  256 257 258 259      300       17
    pages     table(s3)[pos // page_size] ...              where K and V of the row are written
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, and the pages that hold [0, start + num_tokens).

    Attributes:
        pages: the sequence's page table so far, first page first. It may be longer than needed. An `array("q")` is read
            several times faster than a list.
        prompt: the tokens belong to a prompt. This matters for a span of one token: if the cuts of a prompt must change
            no bit, its attention is summed like that of its neighbours, not like a decode's.
    """

    start: int
    num_tokens: int
    pages: Sequence[int]
    prompt: bool = False


class SpanRows(NamedTuple):
    """One span as the attention backends see it: its rows are [first_row, first_row + num_tokens).

    Attributes:
        first_page: index in `of_all` of the span's first page.
        num_pages: exactly the ceil(end / page_size) pages that hold keys [0, end).
        of_all: the page ids of the microbatch.
        prompt: see Span.
    """

    start: int
    num_tokens: int
    first_row: int
    first_page: int
    num_pages: int
    of_all: Tensor
    prompt: bool = False

    @property
    def pages(self) -> Tensor:
        """The span's page ids, (num_pages,) int64."""
        return self.of_all[self.first_page : self.first_page + self.num_pages]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class StageInputs(NamedTuple):
    """One microbatch of T rows for one stage. It is the same on every stage, is built once and is read by every layer.

    Attributes:
        position_ids: (T,) int64, index of each row's token in its sequence.
        write_pages: (T,) int64, page for each row's K and V.
        write_offsets: (T,) int64, place in that page.
        logit_rows: (n,) int64, rows whose logits are wanted.
        pages: (n,) int64, the spans' pages one after the other.
        all_logits: logit_rows are all rows in order.
    """

    position_ids: Tensor
    write_pages: Tensor
    write_offsets: Tensor
    logit_rows: Tensor
    spans: tuple[SpanRows, ...]
    pages: Tensor
    all_logits: bool = False

    @property
    def num_tokens(self) -> int:
        return self.position_ids.shape[0]


def build_inputs(spans: Sequence[Span], logit_rows: Sequence[int], page_size: int, device: torch.device) -> StageInputs:
    """Return all index tensors of one microbatch, moved to the device in one copy.

    A span whose pages do not reach its last token is a bug of the caller, and an assertion fails. Otherwise it would
    write into the pages of another sequence.
    """
    laid = _Layout.of(spans, page_size)
    wanted = array("q", logit_rows)
    parts = [laid.positions, laid.write_pages, laid.write_offsets, wanted, laid.pages]
    buffer = on_device(_tensor(parts), device)
    positions, pages, offsets, logits, page_ids = torch.split_with_sizes(buffer, [len(part) for part in parts])
    every = len(wanted) == len(laid.positions) and wanted == array("q", range(len(wanted)))
    return StageInputs(positions, pages, offsets, logits, laid.rows(spans, page_ids), page_ids, every)


class CapturableInputs:
    """Inputs of every microbatch at the same addresses, as a CUDA graph reads them.

    A smaller microbatch is padded: with rows at position 0 that are written to the spare page, and with logits of row
    0.

    Attributes:
        token_ids: (num_tokens,) int64, for a stage that embeds.

    Args:
        num_tokens: rows of the graph.
        num_logit_rows: rows of the graph's logits.
    """

    def __init__(
        self, num_tokens: int, num_logit_rows: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self._page_size = page_size
        self._spare_page = num_pages
        self._sizes = [num_tokens, num_tokens, num_tokens, num_tokens, num_logit_rows, num_pages]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.token_ids, positions, pages, offsets, logits, page_ids = torch.split_with_sizes(self._buffer, self._sizes)
        self.inputs = StageInputs(positions, pages, offsets, logits, (), page_ids)

    def load(self, spans: Sequence[Span], logit_rows: Sequence[int], token_ids: Sequence[int]) -> StageInputs:
        """Write a microbatch over the previous one, when the device reaches this point, and return its inputs there."""
        laid = _Layout.of(spans, self._page_size)
        num_tokens, num_logit_rows = self._sizes[0], self._sizes[4]
        parts = [
            _padded(token_ids, num_tokens),
            _padded(laid.positions, num_tokens),
            _padded(laid.write_pages, num_tokens, self._spare_page),
            _padded(laid.write_offsets, num_tokens),
            _padded(logit_rows, num_logit_rows),
            laid.pages,
        ]
        host = pinned(_tensor(parts), self._buffer.device)
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        return self.inputs._replace(spans=laid.rows(spans, self.inputs.pages[: len(laid.pages)]))


def _padded(numbers: Sequence[int], length: int, number: int = 0) -> array[int]:
    return array("q", [*numbers, *[number] * (length - len(numbers))])


def _tensor(parts: Sequence[array[int]]) -> Tensor:
    """Return all parts in one tensor, one after the other."""
    numbers = array("q")
    for part in parts:
        numbers.extend(part)
    return torch.frombuffer(numbers, dtype=torch.int64)


class _Layout(NamedTuple):
    """The places of the rows of some spans.

    Python's own arrays hold them, and are filled one page at a time. Between microbatches, the processor's caches are
    full of weights. Two dozen operations on small numpy arrays then take 1.5 times as long as these loops.

    Attributes:
        positions: position of each row.
        write_pages: page of each row.
        write_offsets: place of each row in its page.
        pages: see StageInputs.
        used: number of pages per span.
    """

    positions: array[int]
    write_pages: array[int]
    write_offsets: array[int]
    pages: array[int]
    used: list[int]

    @classmethod
    def of(cls, spans: Sequence[Span], page_size: int) -> _Layout:
        positions, write_pages, write_offsets, pages = array("q"), array("q"), array("q"), array("q")
        used: list[int] = []
        for at, num_tokens, table, _ in spans:
            end = at + num_tokens
            needed = -(-end // page_size)
            assert num_tokens > 0 and at >= 0, f"span {at}+{num_tokens} has no tokens"
            assert len(table) >= needed, f"{at}+{num_tokens} needs {needed} pages, has {len(table)}"
            used.append(needed)
            pages.extend(table[:needed])
            if num_tokens == 1:  # most spans have one token
                positions.append(at)
                write_pages.append(table[needed - 1])
                write_offsets.append(at % page_size)
                continue
            positions.extend(range(at, end))
            while at < end:
                offset = at % page_size
                count = min(page_size - offset, end - at)
                write_pages.extend([table[at // page_size]] * count)
                write_offsets.extend(range(offset, offset + count))
                at += count
        return cls(positions, write_pages, write_offsets, pages, used)

    def rows(self, spans: Sequence[Span], page_ids: Tensor) -> tuple[SpanRows, ...]:
        """Return the spans with their rows and pages.

        Args:
            page_ids: the pages, on the device.
        """
        made: list[SpanRows] = []
        first_row = first_page = 0
        for (start, num_tokens, _, prompt), used in zip(spans, self.used, strict=True):
            made.append(SpanRows(start, num_tokens, first_row, first_page, used, page_ids, prompt))
            first_row += num_tokens
            first_page += used
        return tuple(made)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor in host memory. The device makes it when it reaches this point.

    The program does not wait.
    """
    return host if device.type == "cpu" else pinned(host, device).to(device, non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """Return the tensor in memory from which a device copies on its own.

    A copy from other memory waits for all work that the device was given before.
    """
    return host if device.type == "cpu" else host.pin_memory()
