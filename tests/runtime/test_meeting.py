"""Ranks meet in a store whatever an earlier start has left there, and say who is missing where they do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from sarathi_pp.errors import PeerLostError
from sarathi_pp.runtime.meeting import meet
from sarathi_pp.trace.clock import SystemClock

SOON = timedelta(seconds=0.3)


def start(store, world_size, ranks=None, timeout=timedelta(seconds=20)):
    """Each rank's part of the store, of those that come, in the order in which they are told to."""
    ranks = list(range(world_size)) if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = {rank: pool.submit(meet, store, rank, world_size, timeout, SystemClock()) for rank in ranks}
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_have_one_part_and_no_start_has_anothers(order):
    store = HashStore()
    for number in range(5):
        parts = {rank: met.result() for rank, met in start(store, 3, order).items()}
        assert not parts[0].check(["key"])
        parts[0].set("key", str(number))
        assert {part.get("key") for part in parts.values()} == {str(number).encode()}


@pytest.mark.parametrize("came", [[0, 1], [1, 2], [0]])
def test_what_a_start_has_left_that_never_met_is_in_nobodys_way(came):
    store = HashStore()
    for met in start(store, 3, came, SOON).values():
        assert isinstance(met.exception(), PeerLostError)
    parts = [met.result() for met in start(store, 3).values()]
    parts[1].set("key", "again")
    assert parts[2].get("key") == b"again"


def test_who_is_missing_is_named():
    found = start(HashStore(), 4, [0, 2], SOON)
    assert "2 of 4 ranks have come, missing: 1, 3;" in str(found[0].exception())
    assert "rank 2 of 4 was not met by rank 0" in str(found[2].exception())
