"""The work of one microbatch's attention, cut into programs on the host, once for all layers with the same window.

A program is a unit of work that one processor of the GPU computes. A tile is consecutive tokens of one sequence. It has
a row for each token and each query head that shares a KV head. The keys of a tile are all keys that any of its rows
sees. If there are too few tiles to fill the device, the keys are cut into pieces of whole blocks (Flash-Decoding, Dao
et al. 2023). A piece for one KV head is a program:

                 keys of the sequence                       block_keys
    tile 0       |---- piece 0 ----|-- piece 1 --|          pieces of a tile begin at multiples of it
    tile 1       |---- piece 2 ----|---- piece 3 ----|      partial results, merged by a second kernel
    a decode     |-- piece 4 --|                            alone, so it writes the output itself

Blocks, pieces and tiles begin at points that depend on the sequence's own tokens and on the keys per piece. The other
sequences of the microbatch decide the keys per piece. They also decide whether rows are computed by the warps of a
chunk's block. These warps add up a row's sums in another order than those of decodes alone. So the last bits of a row
can depend on the other sequences. Chunks and decodes are in one table, so they need only one launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

# Number of int32 columns of a piece. They are: index in the microbatch of its tile's first row; number of tokens of the
# tile; position of the first token; index of the sequence's first page id; first key and end of the keys that the piece
# reads; index of its first partial result, or -1 if it writes the output itself; 1 if it takes the sinks, otherwise 0.
PIECE_COLUMNS = 8
# Number of int32 columns of a merge. They are: index of the tile's first row; number of tokens of the tile; index of
# the first partial result of its first piece; number of pieces; number of tokens of all tiles before it in the table.
MERGE_COLUMNS = 5

# Number of programs that a processor of the GPU holds at once, for blocks of few rows. This needs 160 KiB of shared
# memory (A100, H100). Other processors hold one program, but contexts are cut for two there as well. For blocks of many
# rows, see Blocks.many_programs.
_PROGRAMS_PER_PROCESSOR = 2
# Number of merging programs per processor of the GPU, which it holds at once. Each computes several rows if there are
# more. A graph launches the same number for every microbatch, even if there is nothing to merge.
_MERGES_PER_PROCESSOR = 8
# Least keys of a piece per row of its block. Fewer keys are not worth a merge. With this number, the partial results,
# written and read again, have an eighth of the bytes of the piece's keys and values.
_LEAST_KEYS_PER_ROW = 16
# The fewest rows that tensor cores multiply.
_LEAST_ROWS = 16
_INT_BYTES = 4
_NUM_KEYS = attrgetter("num_keys")


class Extent(NamedTuple):
    """Rows [first_row, first_row + num_tokens) of the microbatch: tokens [start, start + num_tokens) of one sequence.

    Attributes:
        first_page: index of the sequence's first page id. The page ids of all sequences are in one array.
    """

    first_row: int
    num_tokens: int
    start: int
    first_page: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The numbers of rows and keys that one program holds at once (a block). A row is one query head of one token.

    Tiles of up to few_rows rows, mostly decodes, have small blocks, in which fewer rows stay unused. All other tiles
    have blocks of many_rows.

    Attributes:
        group: number of query heads that share a KV head.
        few_rows: number of rows of a small block.
        many_rows: number of rows of a large block.
        keys: number of keys of a block.
        registers: most registers of a thread; None leaves their number to the compiler.
        ahead: in large blocks, multiply queries and keys one block ahead, during the softmax of the block before.
        many_programs: number of programs with large blocks that a processor of the GPU holds at once, 1 or 2. Contexts
            are cut for them.
    """

    group: int
    few_rows: int
    many_rows: int
    keys: int
    registers: int | None = None
    ahead: bool = False
    many_programs: int = 1

    @classmethod
    def of(cls, group: int, head_dim: int, itemsize: int) -> Blocks:
        """Return blocks as large as 99 KiB of shared memory and the registers allow.

        Shared memory holds two blocks of keys and two of values. It holds three of each if products read shared memory
        directly, as on Hopper, which has more of it.

        Args:
            itemsize: bytes of a query, key or value. With 4, tensor cores have no IEEE products, and the factors are in
                registers. More than 32 rows were then seen to spill thousands of bytes.
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
    """The work of the attention kernel for one microbatch, as tables on the device.

    Attributes:
        pieces: (N, PIECE_COLUMNS) int32, the pieces of all tiles.
        merges: (M, MERGE_COLUMNS) int32, the tiles that were cut into several pieces.
        window: number of keys that a row sees, up to its own; None for all.
        partial_rows: number of partial results: one for each row of each piece of these tiles.
        merge_programs: number of programs that share the merges.
        has_many: a tile has more than blocks.few_rows rows.
    """

    pieces: Tensor
    merges: Tensor
    blocks: Blocks
    window: int | None
    partial_rows: int
    merge_programs: int
    has_many: bool

    @property
    def most_rows(self) -> int:
        """Number of rows of the largest block that its tiles need."""
        return self.blocks.many_rows if self.has_many else self.blocks.few_rows


class _Tile(NamedTuple):
    """One tile.

    Attributes:
        num_keys: number of keys from first_key to the last key that any row sees.
        first_row: index in the microbatch of its first row.
        start: position of its first token.
        first_page: see Extent.
        first_key: start of the first block with a key that any row sees.
        rows: number of rows of its block.
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
    """Return the work of a microbatch, moved to the device in one copy.

    Args:
        extents: one per sequence of the microbatch.
        window: number of keys that a row sees; None for all.
        num_processors: number of the GPU's streaming multiprocessors.
        keys_per_piece: most keys of a piece, about; None chooses it so that the pieces fill the device.
    """
    cut = _cut(extents, blocks, window, num_kv_heads, num_processors, keys_per_piece)
    table = _moved(torch.frombuffer(cut.pieces + cut.merges, dtype=torch.int32), device)
    return AttentionWork(
        table[: len(cut.pieces)].view(-1, PIECE_COLUMNS),
        table[len(cut.pieces) :].view(-1, MERGE_COLUMNS),
        blocks,
        window,
        cut.partial_rows,
        _merge_programs(cut.merged_tokens, blocks, num_kv_heads, num_processors),
        cut.has_many,
    )


class CapturableWork:
    """The work of one microbatch after another, at the same addresses and in the same launches, for a CUDA graph.

    The tables have room for the largest microbatch. After the pieces and merges of a smaller one, they hold entries
    without tokens, whose programs end at once.

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
        # All tiles of a sequence are full except its last. A tile that reads x shares of all keys has at most x + 1/2
        # pieces, and one piece below x = 3/2. So pieces exceed tiles by at most the number of shares.
        tiles = num_seqs + (num_tokens // (rows // blocks.group) if is_large else 0)
        shares = -(-num_processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads)
        self._num_pieces, self._num_merges = tiles + shares, min(tiles, shares)
        self._table = torch.zeros(
            self._num_pieces * PIECE_COLUMNS + self._num_merges * MERGE_COLUMNS, dtype=torch.int32, device=device
        )
        end = self._num_pieces * PIECE_COLUMNS
        merged_tokens = min(num_tokens, self._num_merges * (rows // blocks.group))
        self.work = AttentionWork(
            self._table[:end].view(-1, PIECE_COLUMNS),
            self._table[end:].view(-1, MERGE_COLUMNS),
            blocks,
            window,
            # The pieces of a split tile are at most 4/3 of its shares.
            partial_rows=4 * shares // 3 * rows,
            merge_programs=_merge_programs(merged_tokens, blocks, num_kv_heads, num_processors),
            has_many=has_many,
        )

    def load(self, extents: Sequence[Extent]) -> None:
        """Write a microbatch's work over the previous one, when the device has finished the work before."""
        work = self.work
        cut = _cut(extents, work.blocks, work.window, self._num_kv_heads, self._num_processors, None)
        pieces, merges = len(cut.pieces) // PIECE_COLUMNS, len(cut.merges) // MERGE_COLUMNS
        assert pieces <= self._num_pieces and merges <= self._num_merges, f"{pieces} pieces, {merges} merges"
        assert cut.partial_rows <= work.partial_rows and (work.has_many or not cut.has_many)
        table = cut.pieces + array("i", bytes(_INT_BYTES * PIECE_COLUMNS * (self._num_pieces - pieces))) + cut.merges
        table.frombytes(bytes(_INT_BYTES * MERGE_COLUMNS * (self._num_merges - merges)))
        host = torch.frombuffer(table, dtype=torch.int32)
        self._table.copy_(_pinned(host, self._table.device), non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The work before it moves to the device: tables as int32 numbers, row by row. See AttentionWork.

    Attributes:
        merged_tokens: number of tokens of all tiles that were cut into several pieces.
    """

    pieces: array[int]
    merges: array[int]
    partial_rows: int
    merged_tokens: int
    has_many: bool


def _cut(
    extents: Sequence[Extent],
    blocks: Blocks,
    window: int | None,
    num_kv_heads: int,
    num_processors: int,
    keys_per_piece: int | None,
) -> _Cut:
    """Cut the work of a microbatch into pieces.

    This runs between two microbatches, when the device may have no other work. So it uses tuples and arrays, which are
    faster than objects.
    """
    assert extents, "a microbatch has sequences"
    tiles: list[_Tile] = []
    for extent in extents:
        tiles += _tiles(extent, blocks, window)
    # Long tiles come first. So the last ones to start are short, and the device does not wait long for a single one.
    tiles.sort(key=_NUM_KEYS, reverse=True)
    has_many = any(tile.rows > blocks.few_rows for tile in tiles)
    programs = num_processors * (blocks.many_programs if has_many else _PROGRAMS_PER_PROCESSOR)
    share = equal_share(sum(map(_NUM_KEYS, tiles)), num_kv_heads, programs)
    pieces, merges = array("i"), array("i")
    partial_rows = merged_tokens = 0
    for num_keys, first_row, num_tokens, start, first_page, first_key, rows in tiles:
        step = _step(num_keys, keys_per_piece or max(share, _LEAST_KEYS_PER_ROW * rows), blocks.keys)
        end_key = first_key + num_keys
        if step >= num_keys:
            pieces.extend((first_row, num_tokens, start, first_page, first_key, end_key, -1, 1))
            continue
        merges.extend((first_row, num_tokens, partial_rows, -(-num_keys // step), merged_tokens))
        merged_tokens += num_tokens
        for key in range(first_key, end_key, step):
            end, takes_sinks = min(key + step, end_key), int(key == first_key)
            pieces.extend((first_row, num_tokens, start, first_page, key, end, partial_rows, takes_sinks))
            partial_rows += num_tokens * blocks.group
    return _Cut(pieces, merges, partial_rows, merged_tokens, has_many)


def _merge_programs(merged_tokens: int, blocks: Blocks, num_kv_heads: int, num_processors: int) -> int:
    """Return the number of merging programs: one per head of a merged token, up to the number that runs at once."""
    return min(merged_tokens * num_kv_heads * blocks.group, num_processors * _MERGES_PER_PROCESSOR)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    return _pinned(host, device).to(device, non_blocking=True)


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    """Return the tensor in pinned memory for a GPU. The copy from other memory may wait for the device."""
    return host.pin_memory() if device.type == "cuda" else host


def equal_share(num_keys: int, num_kv_heads: int, num_programs: int) -> int:
    """Return how many keys each program reads if all programs that the device holds at once read equally many.

    With pieces of about this size, a long decode next to a chunk is cut as well. If there are enough tiles of about the
    same length, none is cut.

    Args:
        num_keys: number of keys that all tiles read together, for each KV head.
        num_programs: number of programs that the device holds at once.
    """
    return -(-num_keys * num_kv_heads // num_programs)


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
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
    """Return the number of keys from the start of one piece of a tile to the start of the next.

    num_keys or more means that the tile has one piece. Pieces are about equal and not empty. Their number is num_keys /
    keys_per_piece, rounded to the nearest number, not up. Otherwise a tile that is a little longer than others would
    need two pieces and a merge.
    """
    num_pieces = (2 * num_keys + keys_per_piece) // (2 * keys_per_piece)
    return num_keys if num_pieces <= 1 else -(-num_keys // (num_pieces * block_keys)) * block_keys
