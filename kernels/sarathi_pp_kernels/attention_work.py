"""How the attention of one microbatch is cut into programs, on the host, once for all layers with the same window.

A tile is consecutive tokens of one sequence, times the query heads that share a KV head, one row each. What a tile
reads, the keys that any of its rows sees, is cut into pieces of whole blocks where there are too few tiles to fill the
device (Flash-Decoding, Dao et al. 2023), and a piece for one KV head is a program:

                 keys of the sequence                       block_keys
    tile 0       |---- piece 0 ----|-- piece 1 --|          pieces of a tile begin at multiples of it
    tile 1       |---- piece 2 ----|---- piece 3 ----|      partial results, merged by a second kernel
    a decode     |-- piece 4 --|                            alone, so it writes the output itself

Where blocks, pieces and tiles begin depends on the sequence's own tokens and on keys_per_piece, so that what else is
in the microbatch changes a row's result only by way of that number. Chunks and decodes lie in one table: one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# int32 columns of a piece: its tile's first row in the microbatch, tokens, and position of the first of them; where
# the sequence's page table begins; the keys [first, end) it reads; its first partial row, or -1; 1 if it takes the
# sinks, else 0.
PIECE_COLUMNS = 8
# int32 columns of a merge: the tile's first row and tokens; the first partial row of its first piece; pieces.
MERGE_COLUMNS = 4

# Programs that a processor of the device holds at once, and those with room for many rows.
_PROGRAMS_PER_PROCESSOR = 2
_LARGE_PROGRAMS_PER_PROCESSOR = 1
# Fewer keys are not worth a merge: of a piece that reads so many, each row's partial result, written and read again, is
# an eighth of the bytes of its keys and values.
_LEAST_KEYS_PER_ROW = 16
# The least rows that tensor cores multiply.
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Extent:
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


@dataclass(frozen=True, slots=True)
class _Tile:
    """rows: of its block. first_key: the first block with a key that any row sees; end_key: behind the last one."""

    extent: Extent
    first_row: int
    num_tokens: int
    start: int
    rows: int
    first_key: int

    @property
    def end_key(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_keys(self) -> int:
        return self.end_key - self.first_key


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
    table = _moved(torch.tensor(cut.pieces + cut.merges, dtype=torch.int32), device)
    return AttentionWork(
        table[: len(cut.pieces)].view(-1, PIECE_COLUMNS),
        table[len(cut.pieces) :].view(-1, MERGE_COLUMNS),
        blocks,
        window,
        cut.partial_rows,
        cut.most_merged_tokens,
        cut.has_many,
    )


class FixedWork:
    """The work of one microbatch after the other at the same addresses and in the same launches, as a captured graph
    needs it: tables and partial results as large as any microbatch's, and pieces and merges of no tokens behind its
    own, which end at once.

    num_tokens, num_seqs: most of a microbatch; longest: most tokens of one of its sequences.
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
        has_many = longest * blocks.group > blocks.few_rows
        rows = blocks.many_rows if has_many else blocks.few_rows
        # A sequence's tiles are full but for its last; no piece is cut for less than an equal share of all reading.
        tiles = num_seqs + (num_tokens // (rows // blocks.group) if has_many else 0)
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
            # A tile that is split once has two pieces.
            partial_rows=2 * shares * rows,
            most_merged_tokens=rows // blocks.group,
            has_many=has_many,
        )

    def load(self, extents: Sequence[Extent]) -> None:
        """Put a microbatch's work in place of the one before, when the device comes to it."""
        work = self.work
        cut = _cut(extents, work.blocks, work.window, self._num_kv_heads, self._num_processors, None)
        pieces, merges = len(cut.pieces) // PIECE_COLUMNS, len(cut.merges) // MERGE_COLUMNS
        assert pieces <= self._num_pieces and merges <= self._num_merges, f"{pieces} pieces, {merges} merges"
        assert cut.partial_rows <= work.partial_rows and cut.most_merged_tokens <= work.most_merged_tokens
        assert work.has_many or not cut.has_many
        table = torch.zeros(self._table.shape, dtype=torch.int32)
        table[: len(cut.pieces)] = torch.tensor(cut.pieces, dtype=torch.int32)
        end = self._num_pieces * PIECE_COLUMNS
        table[end : end + len(cut.merges)] = torch.tensor(cut.merges, dtype=torch.int32)
        self._table.copy_(_pinned(table, self._table.device), non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """See AttentionWork: pieces and merges as numbers in a row."""

    pieces: list[int]
    merges: list[int]
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
    tiles = [tile for extent in extents for tile in _tiles(extent, blocks, window)]
    # Long ones first: what is begun last is then short, and the device is not left waiting for one program.
    tiles.sort(key=lambda tile: tile.num_keys, reverse=True)
    has_many = any(tile.rows > blocks.few_rows for tile in tiles)
    programs = num_processors * (_LARGE_PROGRAMS_PER_PROCESSOR if has_many else _PROGRAMS_PER_PROCESSOR)
    share = equal_share([tile.num_keys for tile in tiles], num_kv_heads, programs)
    pieces: list[int] = []
    merges: list[int] = []
    partial_rows = most_merged_tokens = 0
    for tile in tiles:
        bounds = _bounds(tile, keys_per_piece or max(share, _LEAST_KEYS_PER_ROW * tile.rows), blocks.keys)
        split = len(bounds) > 2
        rows = tile.num_tokens * blocks.group
        if split:
            merges += (tile.first_row, tile.num_tokens, partial_rows, len(bounds) - 1)
            most_merged_tokens = max(most_merged_tokens, tile.num_tokens)
        for first, end in zip(bounds, bounds[1:], strict=False):
            partial = partial_rows if split else -1
            place = (tile.first_row, tile.num_tokens, tile.start, tile.extent.first_page)
            pieces += (*place, first, end, partial, int(first == tile.first_key))
            partial_rows += rows if split else 0
    return _Cut(pieces, merges, partial_rows, most_merged_tokens, has_many)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    return _pinned(host, device).to(device, non_blocking=True)


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    """From memory that is not pinned a copy to a device may wait for it."""
    return host.pin_memory() if device.type == "cuda" else host


def equal_share(tile_keys: Sequence[int], num_kv_heads: int, num_programs: int) -> int:
    """How many keys each of the programs reads that the device holds at once, for tiles that read so many each.

    With pieces of about as many a long decode beside a chunk is cut as well, and where there are enough tiles of about
    the same length nothing is.
    """
    return -(-sum(tile_keys) * num_kv_heads // num_programs)


def power_of_two(count: int) -> int:
    """The least power of two that is not less than `count`."""
    return 1 << (count - 1).bit_length()


def _tiles(extent: Extent, blocks: Blocks, window: int | None) -> Iterator[_Tile]:
    rows = blocks.few_rows if extent.num_tokens * blocks.group <= blocks.few_rows else blocks.many_rows
    step = rows // blocks.group
    for token in range(0, extent.num_tokens, step):
        start = extent.start + token
        seen = 0 if window is None else max(start - window + 1, 0)
        num_tokens = min(step, extent.num_tokens - token)
        yield _Tile(extent, extent.first_row + token, num_tokens, start, rows, seen // blocks.keys * blocks.keys)


def _bounds(tile: _Tile, keys_per_piece: int, block_keys: int) -> list[int]:
    """Where the tile's pieces begin, and the end of the last: about equal, and no piece is empty.

    Their number is the nearest, not the next: a tile a little longer than others is not worth two pieces and a merge.
    """
    num_pieces = max((2 * tile.num_keys + keys_per_piece) // (2 * keys_per_piece), 1)
    step = -(-tile.num_keys // (num_pieces * block_keys)) * block_keys
    return [*range(tile.first_key, tile.end_key, step), tile.end_key]
