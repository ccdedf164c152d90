"""The order in which the attention of decodes prefetches pages."""

from __future__ import annotations

from array import array

import pytest
from sarathi_pp_kernels.cpu.attention_decode_simd import AHEAD_BYTES, address_ahead, distance
from sarathi_pp_kernels.cpu.simd.compile import compiled

KEYS, VALUES = 1 << 40, 1 << 41


@compiled()
def _ahead(index, offset, page_bytes, pool, table, last, next_pool, next_table, next_first, next_last):  # type: ignore[no-untyped-def]
    current, following = (pool, table, last), (next_pool, next_table, next_first, next_last)
    return address_ahead(index, offset, distance(page_bytes), current, following)


def _address(table: array[int]) -> int:
    return table.buffer_info()[0]


@pytest.mark.parametrize("page_bytes", [2048, 12288, 16384, AHEAD_BYTES, 3 * AHEAD_BYTES])
def test_pages_are_prefetched_in_the_order_in_which_they_are_read(page_bytes: int) -> None:
    """The keys of a row are read, then its values, then the keys that the next row's window leaves."""
    pages = 2 + AHEAD_BYTES // page_bytes
    table, next_table = array("q", range(50, 50 + pages)), array("q", range(200, 203 + pages))
    read = [KEYS + page * page_bytes for page in table] + [VALUES + page * page_bytes for page in table]
    read += [KEYS + page * page_bytes for page in next_table[3:]]
    own, others = _address(table), _address(next_table)
    values, next_keys = (VALUES, own, 0, pages - 1), (KEYS, others, 3, pages + 2)
    steps = [page + offset for page in read for offset in range(0, page_bytes, 1024)]
    ahead = [
        _ahead(index, offset, page_bytes, pool, own, pages - 1, *following)
        for pool, following in ((KEYS, values), (VALUES, next_keys))
        for index in range(pages)
        for offset in range(0, page_bytes, 1024)
    ]
    assert ahead == steps[AHEAD_BYTES // 1024 :][: len(ahead)]


def test_a_short_row_that_follows_is_not_left() -> None:
    """Its page table ends after one page, so no id after that is read."""
    table, next_table = array("q", [5, 6]), array("q", [7, -1, -1])
    ahead = _ahead(1, 512, 1024, VALUES, _address(table), 1, KEYS, _address(next_table), 0, 0)
    assert ahead == KEYS + 7 * 1024 + 512
