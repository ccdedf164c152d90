"""How the attention of one microbatch is cut into programs, on the host, once for all layers with the same window.

A tile is consecutive tokens of one sequence, times the query heads that share a KV head, one row each. What a tile
reads, the keys that any of its rows sees, is cut into pieces of whole blocks where there are too few tiles to fill the
device (Flash-Decoding, Dao et al. 2023), and a piece for one KV head is a program:

                 keys of the sequence                       block_keys
    tile 0       |---- piece 0 ----|-- piece 1 --|          pieces of a tile begin at multiples of it
    tile 1       |---- piece 2 ----|---- piece 3 ----|      partial results, merged by a second kernel
    a decode     |-- piece 4 --|                            alone, so it writes the output itself

Where blocks, pieces and tiles begin depends on the sequence's own tokens and on the keys a piece, which what else is in
the microbatch decides; and so does whether rows are computed by the warps of a chunk's block, which add up a row's sums
in another order than those of decodes alone. Chunks and decodes lie in one table: one launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

# int32 columns of a piece: its tile's first row in the microbatch, tokens, and position of the first of them; where
# the sequence's page table begins; the keys [first, end) it reads; its first partial row, or -1; 1 if it takes the
# sinks, else 0.
PIECE_COLUMNS = 8
# int32 columns of a merge: the tile's first row and tokens; the first partial row of its first piece; pieces.
MERGE_COLUMNS = 4

# Programs that a processor holds at once, and those with room for many rows, where it has 160 KiB of shared memory and
# more (A100, H100). Others hold one of either kind: contexts are cut for two there all the same.
_PROGRAMS_PER_PROCESSOR = 2
_LARGE_PROGRAMS_PER_PROCESSOR = 1
# Fewer keys are not worth a merge: of a piece that reads so many, each row's partial result, written and read again, is
# an eighth of the bytes of its keys and values.
_LEAST_KEYS_PER_ROW = 16
# The least rows that tensor cores multiply.
_LEAST_ROWS = 16
_INT_BYTES = 4
_NUM_KEYS = attrgetter("num_keys")


class Extent(NamedTuple):
    """Rows [first_row, first_row + num_tokens) of the microbatch: tokens [start, start + num_tokens) of one sequence.

    first_page: where its page table begins in the microbatch's page tables, one after the other.
    """

    first_row: int
    num_tokens: int
    start: int
    first_page: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one program holds at once. Tiles of up to few_rows rows, decodes above all, leave less idle in blocks of
    their own; all others have many_rows. A row is one token's one query head; group: of those share a KV head.
    """

    group: int
    few_rows: int
    many_rows: int
    keys: int

    @classmethod
    def of(cls, group: int, head_dim: int, itemsize: int) -> Blocks:
        """As large as 99 KiB of shared memory take with two blocks of keys and of values in it, and registers. There
        are three of each where products read shared memory themselves, as on Hopper, which has more of it.

        itemsize: bytes of a query, key or value. With 4 there are no tensor cores for IEEE products, whose factors then
        lie in registers: more than 32 rows were seen to spill thousands of bytes.
        """
        few_rows = max(_LEAST_ROWS, power_of_two(group))
        dim = power_of_two(head_dim)
        if itemsize == 4:
            many_rows, keys = 32, 32 if dim <= 128 else 16
        else:
            many_rows, keys = (128, 64) if dim <= 128 else (64, 32)
        return cls(group, few_rows, max(many_rows, few_rows), keys)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The programs of one microbatch. pieces: (N, PIECE_COLUMNS), merges: (M, MERGE_COLUMNS), int32 on the device.

    window: a row sees so many keys up to its own; None: all. partial_rows: of all split tiles' pieces.
    most_merged_tokens: of a split tile. has_many: a tile has more than blocks.few_rows rows.
    """

    pieces: Tensor
    merges: Tensor
    blocks: Blocks
    window: int | None
    partial_rows: int
    most_merged_tokens: int
    has_many: bool

    @property
    def most_rows(self) -> int:
        """Of the blocks that its tiles need."""
        return self.blocks.many_rows if self.has_many else self.blocks.few_rows


class _Tile(NamedTuple):
    """num_keys: from first_key, where the first block begins with a key that any row sees, to behind the last one.
    rows: of its block. first_page: see Extent.
    """

    num_keys: int
    first_row: int
    num_tokens: int
    start: int
    first_page: int
    first_key: int
    rows: int


def cut_work(
    extents: Sequence[Extent],
    blocks: Blocks,
    window: int | None,
    num_kv_heads: int,
    num_processors: int,
    device: torch.device,
    *,
    keys_per_piece: int | None = None,
) -> AttentionWork:
    """The work of a microbatch, moved to the device in one copy. keys_per_piece: None chooses it."""
    cut = _cut(extents, blocks, window, num_kv_heads, num_processors, keys_per_piece)
    table = _moved(torch.frombuffer(cut.pieces + cut.merges, dtype=torch.int32), device)
    return AttentionWork(
        table[: len(cut.pieces)].view(-1, PIECE_COLUMNS),
        table[len(cut.pieces) :].view(-1, MERGE_COLUMNS),
        blocks,
        window,
        cut.partial_rows,
        cut.most_merged_tokens,
        cut.has_many,
    )


class CapturableWork:
    """The work of every microbatch at the same addresses and in the same launches, as a CUDA graph needs it.

    Tables and partial results are as large as any microbatch's. Pieces and merges of no tokens follow its own, and end
    at once.

    Args:
        num_tokens: most tokens of a microbatch.
        num_seqs: most sequences of a microbatch.
        longest: most tokens of one of its sequences.
    """

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        longest: int,
        blocks: Blocks,
        window: int | None,
        num_kv_heads: int,
        num_processors: int,
        device: torch.device,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._num_processors = num_processors
        is_large = longest * blocks.group > blocks.few_rows
        has_many = is_large and blocks.many_rows > blocks.few_rows
        rows = blocks.many_rows if has_many else blocks.few_rows
        # A sequence's tiles are full but for its last. A tile that reads x shares of all keys has x + 1/2 pieces at
        # most, and one below x = 3/2; so pieces are no more above the number of tiles than there are shares.
        tiles = num_seqs + (num_tokens // (rows // blocks.group) if is_large else 0)
        shares = -(-num_processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads)
        self._num_pieces, self._num_merges = tiles + shares, min(tiles, shares)
        self._table = torch.zeros(
            self._num_pieces * PIECE_COLUMNS + self._num_merges * MERGE_COLUMNS, dtype=torch.int32, device=device
        )
        end = self._num_pieces * PIECE_COLUMNS
        self.work = AttentionWork(
            self._table[:end].view(-1, PIECE_COLUMNS),
            self._table[end:].view(-1, MERGE_COLUMNS),
            blocks,
            window,
            # The pieces of a tile that is split are at most 4/3 of its shares.
            partial_rows=4 * shares // 3 * rows,
            most_merged_tokens=min(rows // blocks.group, longest),
            has_many=has_many,
        )

    def load(self, extents: Sequence[Extent]) -> None:
        """Replace the previous microbatch's work, when the device comes to it."""
        work = self.work
        cut = _cut(extents, work.blocks, work.window, self._num_kv_heads, self._num_processors, None)
        pieces, merges = len(cut.pieces) // PIECE_COLUMNS, len(cut.merges) // MERGE_COLUMNS
        assert pieces <= self._num_pieces and merges <= self._num_merges, f"{pieces} pieces, {merges} merges"
        assert cut.partial_rows <= work.partial_rows and cut.most_merged_tokens <= work.most_merged_tokens
        assert work.has_many or not cut.has_many
        table = cut.pieces + array("i", bytes(_INT_BYTES * PIECE_COLUMNS * (self._num_pieces - pieces))) + cut.merges
        table.frombytes(bytes(_INT_BYTES * MERGE_COLUMNS * (self._num_merges - merges)))
        host = torch.frombuffer(table, dtype=torch.int32)
        self._table.copy_(_pinned(host, self._table.device), non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """See AttentionWork: pieces and merges as int32 numbers in a row."""

    pieces: array[int]
    merges: array[int]
    partial_rows: int
    most_merged_tokens: int
    has_many: bool


def _cut(
    extents: Sequence[Extent],
    blocks: Blocks,
    window: int | None,
    num_kv_heads: int,
    num_processors: int,
    keys_per_piece: int | None,
) -> _Cut:
    """Between two microbatches, when the device has nothing else to do: in tuples and arrays, not in objects."""
    assert extents, "a microbatch has sequences"
    tiles: list[_Tile] = []
    for extent in extents:
        tiles += _tiles(extent, blocks, window)
    # Long ones first: what is begun last is then short, and the device is not left waiting for one program.
    tiles.sort(key=_NUM_KEYS, reverse=True)
    has_many = any(tile.rows > blocks.few_rows for tile in tiles)
    programs = num_processors * (_LARGE_PROGRAMS_PER_PROCESSOR if has_many else _PROGRAMS_PER_PROCESSOR)
    share = equal_share(sum(map(_NUM_KEYS, tiles)), num_kv_heads, programs)
    pieces, merges = array("i"), array("i")
    partial_rows = most_merged_tokens = 0
    for num_keys, first_row, num_tokens, start, first_page, first_key, rows in tiles:
        step = _step(num_keys, keys_per_piece or max(share, _LEAST_KEYS_PER_ROW * rows), blocks.keys)
        end_key = first_key + num_keys
        if step >= num_keys:
            pieces.extend((first_row, num_tokens, start, first_page, first_key, end_key, -1, 1))
            continue
        merges.extend((first_row, num_tokens, partial_rows, -(-num_keys // step)))
        most_merged_tokens = max(most_merged_tokens, num_tokens)
        for key in range(first_key, end_key, step):
            end, takes_sinks = min(key + step, end_key), int(key == first_key)
            pieces.extend((first_row, num_tokens, start, first_page, key, end, partial_rows, takes_sinks))
            partial_rows += num_tokens * blocks.group
    return _Cut(pieces, merges, partial_rows, most_merged_tokens, has_many)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    return _pinned(host, device).to(device, non_blocking=True)


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    """From memory that is not pinned a copy to a device may wait for it."""
    return host.pin_memory() if device.type == "cuda" else host


def equal_share(num_keys: int, num_kv_heads: int, num_programs: int) -> int:
    """How many keys each of the programs reads that the device holds at once, for tiles that read so many together.

    With pieces of about as many a long decode beside a chunk is cut as well, and where there are enough tiles of about
    the same length nothing is.
    """
    return -(-num_keys * num_kv_heads // num_programs)


def power_of_two(count: int) -> int:
    """The least power of two that is not less than `count`."""
    return 1 << (count - 1).bit_length()


def _tiles(extent: Extent, blocks: Blocks, window: int | None) -> Iterator[_Tile]:
    first_row, count, begin, first_page = extent
    rows = blocks.few_rows if count * blocks.group <= blocks.few_rows else blocks.many_rows
    step = rows // blocks.group
    for token in range(0, count, step):
        start, num_tokens = begin + token, min(step, count - token)
        first_key = 0 if window is None else max(start - window + 1, 0) // blocks.keys * blocks.keys
        num_keys = start + num_tokens - first_key
        own = rows if num_tokens * blocks.group > blocks.few_rows else blocks.few_rows
        yield _Tile(num_keys, first_row + token, num_tokens, start, first_page, first_key, own)


def _step(num_keys: int, keys_per_piece: int, block_keys: int) -> int:
    """How far apart a tile's pieces begin, which are about equal and none of them empty; num_keys or more: it is one.

    Their number is the nearest, not the next: a tile a little longer than others is not worth two pieces and a merge.
    """
    num_pieces = (2 * num_keys + keys_per_piece) // (2 * keys_per_piece)
    return num_keys if num_pieces <= 1 else -(-num_keys // (num_pieces * block_keys)) * block_keys
