"""The inputs of one microbatch on a stage, besides the activations: positions, pages, and rows that need logits.

A row is one token. A span is consecutive tokens of one sequence: several for a prompt chunk, one for a decode. The rows
of a microbatch are the tokens of all its spans, one span after the other:

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

# Most page ids of a microbatch for a CUDA graph, per page. Sequences that share pages may have more ids than pages.
_PAGE_IDS_PER_PAGE = 4
# Added to the positions of rows whose rotary embeddings use the long factors. It is larger than any position.
LONG_FACTORS = 1 << 32


class Span(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, and the pages that hold [0, start + num_tokens).

    Attributes:
        pages: ids of the sequence's pages, first page first. There may be more than needed. An `array("q")` is read
            several times faster than a list.
        prompt: the tokens belong to a prompt. This matters for a span of one token. Some backends sum the attention of
            a decode in another order than that of a chunk. They sum a prompt's token as in a chunk, so that its bits do
            not depend on how the prompt was cut into chunks.
        long_factors: the rotary embeddings use the long factors (longrope).
        slot: id of the sequence's state slot; -1 in a model without states.
    """

    start: int
    num_tokens: int
    pages: Sequence[int]
    prompt: bool = False
    long_factors: bool = False
    slot: int = -1


class SpanRows(NamedTuple):
    """One span as the attention backends see it: its rows are [first_row, first_row + num_tokens) of the microbatch.

    Attributes:
        start: position of the first token in its sequence.
        first_page: index in `of_all` of the span's first page id.
        num_pages: number of pages that hold the keys [0, end): ceil(end / page_size).
        of_all: page ids of all spans of the microbatch, one span after the other.
        prompt: see Span.
        slot: see Span.
    """

    start: int
    num_tokens: int
    first_row: int
    first_page: int
    num_pages: int
    of_all: Tensor
    prompt: bool = False
    slot: int = -1

    @property
    def pages(self) -> Tensor:
        """The span's page ids, (num_pages,) int64."""
        return self.of_all[self.first_page : self.first_page + self.num_pages]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class StageInputs(NamedTuple):
    """The index tensors of one microbatch of T rows. A stage builds them once, and each of its layers reads them.

    They are equal on all stages.

    Attributes:
        position_ids: (T,) int64, index of each row's token in its sequence. LONG_FACTORS is added if the rotary
            embedding of the row uses the long factors.
        write_pages: (T,) int64, id of the page to which each row's key and value are written.
        write_offsets: (T,) int64, index of the row's token within that page.
        logit_rows: (n,) int64, indices of the rows whose logits are wanted.
        spans: the spans, with their rows and pages.
        pages: (m,) int64, page ids of all spans, one span after the other.
        all_logits: logit_rows are all rows in order, so none has to be selected.
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

    A span must have the pages of all its tokens. If it has too few, an assertion fails. Otherwise the span would write
    into the pages of another sequence.

    Args:
        logit_rows: indices of the rows whose logits are wanted.
        page_size: tokens per page.
    """
    laid = _Layout.of(spans, page_size)
    wanted = array("q", logit_rows)
    parts = [laid.positions, laid.write_pages, laid.write_offsets, wanted, laid.pages]
    buffer = on_device(_tensor(parts), device)
    positions, pages, offsets, logits, page_ids = torch.split_with_sizes(buffer, [len(part) for part in parts])
    every = len(wanted) == len(laid.positions) and wanted == array("q", range(len(wanted)))
    return StageInputs(positions, pages, offsets, logits, laid.rows(spans, page_ids), page_ids, every)


class CapturableInputs:
    """The inputs for a CUDA graph, which reads the same memory addresses at each replay.

    `load` writes each microbatch to these addresses. A microbatch with fewer rows than the graph is padded. The padding
    rows have position 0, and their keys and values go to the spare page. Missing logit rows are row 0.

    Attributes:
        token_ids: (num_tokens,) int64, for a stage that embeds.
        inputs: all other inputs, except the spans.
        most_page_ids: most page ids of all spans together.

    Args:
        num_tokens: rows of the graph.
        num_logit_rows: rows of the graph's logits.
        num_pages: pages of the KV shard. It is also the spare page's id.
        page_size: tokens per page.
    """

    def __init__(
        self, num_tokens: int, num_logit_rows: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self._page_size = page_size
        self._spare_page = num_pages
        self.most_page_ids = _PAGE_IDS_PER_PAGE * num_pages
        self._sizes = [num_tokens, num_tokens, num_tokens, num_tokens, num_logit_rows, self.most_page_ids]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.token_ids, positions, pages, offsets, logits, page_ids = torch.split_with_sizes(self._buffer, self._sizes)
        self.inputs = StageInputs(positions, pages, offsets, logits, (), page_ids)

    def load(self, spans: Sequence[Span], logit_rows: Sequence[int], token_ids: Sequence[int]) -> StageInputs:
        """Write a microbatch over the previous one, and return its inputs.

        The program does not wait. The device copies them after the work that it was given before.
        """
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
    """Positions and pages of the rows of some spans, before they become tensors.

    Python's own arrays hold them, and are filled one page at a time. Between microbatches, the processor's caches are
    full of weights. Two dozen operations on small numpy arrays then take 1.5 times as long as these loops.

    Attributes:
        positions: position_ids of StageInputs.
        write_pages: see StageInputs.
        write_offsets: see StageInputs.
        pages: see StageInputs.
        used: number of pages that hold the span's keys, per span.
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
        for at, num_tokens, table, _, long_factors, _ in spans:
            end = at + num_tokens
            shift = LONG_FACTORS if long_factors else 0
            needed = -(-end // page_size)
            assert num_tokens > 0 and at >= 0, f"span {at}+{num_tokens} has no tokens"
            assert len(table) >= needed, f"{at}+{num_tokens} needs {needed} pages, has {len(table)}"
            used.append(needed)
            pages.extend(table[:needed])
            if num_tokens == 1:  # most spans have one token
                positions.append(at + shift)
                write_pages.append(table[needed - 1])
                write_offsets.append(at % page_size)
                continue
            positions.extend(range(at + shift, end + shift))
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
            page_ids: `pages` as a tensor on the device.
        """
        made: list[SpanRows] = []
        first_row = first_page = 0
        for (start, num_tokens, _, prompt, _, slot), used in zip(spans, self.used, strict=True):
            made.append(SpanRows(start, num_tokens, first_row, first_page, used, page_ids, prompt, slot))
            first_row += num_tokens
            first_page += used
        return tuple(made)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device of a tensor in host memory; on CPU, return the tensor itself.

    The program does not wait. The device copies after the work that it was given before.
    """
    return host if device.type == "cpu" else pinned(host, device).to(device, non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """Return the tensor in pinned memory, from which a CUDA device copies without the processor's help.

    A copy from other memory waits for all work that the device was given before. On CPU, return the tensor itself.
    """
    return host if device.type == "cpu" else host.pin_memory()
