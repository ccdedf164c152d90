"""Ranks find each other in a store that may hold entries of an earlier start, and name missing ranks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, TCPStore

import sarathi_pp
from sarathi_pp.distributed import rendezvous as rendezvous_module
from sarathi_pp.distributed.network_interface import Interface
from sarathi_pp.distributed.rendezvous import rendezvous
from sarathi_pp.errors import ConfigError, MissingError
from sarathi_pp.trace.clock import SystemClock
from tests.machine import patient

LOOPBACK, NETWORK = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1")
SOON_S, LATER_S = 1.0, 20.0


def submit(pool, store, rank, world_size, timeout_s=LATER_S, interface=LOOPBACK, refusal=None):
    clock = SystemClock()
    return pool.submit(rendezvous, store, rank, world_size, clock.now() + timeout_s, clock, interface, refusal)


def start(store, world_size, ranks=None, timeout_s=LATER_S):
    """Start each rank's part of the store, for the ranks that come, in the given order."""
    ranks = list(range(world_size)) if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        return {rank: submit(pool, store, rank, world_size, timeout_s) for rank in ranks}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_have_one_part_and_no_start_has_anothers(order):
    store = HashStore()
    for number in range(5):
        parts = {rank: future.result() for rank, future in start(store, 3, order).items()}
        assert not parts[0].check(["key"])
        parts[0].set("key", str(number))
        assert {part.get("key") for part in parts.values()} == {str(number).encode()}


@pytest.mark.parametrize("came", [[0, 1], [1, 2], [0]])
def test_what_a_start_has_left_that_never_met_is_in_nobodys_way(came):
    store = HashStore()
    for future in start(store, 3, came, SOON_S).values():
        assert isinstance(future.exception(), ConfigError)
    parts = [future.result() for future in start(store, 3).values()]
    parts[1].set("key", "again")
    assert parts[2].get("key") == b"again"


def test_who_is_missing_is_named_to_all_that_came():
    found = start(HashStore(), 4, [0, 2], SOON_S)
    for future in found.values():
        assert "2 of 4 ranks have come within --join-timeout, missing: 1, 3;" in str(future.exception())


HOLDER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_store_that_falls_silent_is_not_waited_for(rank, monkeypatch):
    """Its process is stopped, but the kernel still accepts data that is sent there."""
    monkeypatch.setattr(rendezvous_module, "_SILENT_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            store = TCPStore("127.0.0.1", int(holder.stdout.readline()), is_master=False, wait_for_workers=False)
            holder.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            with pytest.raises(ConfigError, match=f"rank {rank} of 2: the rendezvous store has not answered"):
                rendezvous(store, rank, 2, SystemClock().now() + SOON_S, SystemClock(), LOOPBACK)
            assert time.monotonic() - began_s < patient(SOON_S + 3 * 5.0)
        finally:
            holder.kill()


def test_without_rank_0_the_others_say_so():
    future = start(HashStore(), 3, [2], SOON_S)[2]
    assert "rank 2 of 3 got no answer from rank 0 within --join-timeout" in str(future.exception())


@pytest.mark.parametrize("strangers", [[1], [2], [1, 2]])
def test_ranks_of_another_number_are_refused_by_all(strangers):
    """A rank whose number rank 0 does not know refuses too."""
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        others = [submit(pool, store, rank, 3) for rank in strangers]
        time.sleep(0.2)
        first = submit(pool, store, 0, 2)
    says = "was started as one of 3 ranks, rank 0 as one of 2; start all with the same number"
    for future in (first, *others):
        assert isinstance(future.exception(), ConfigError)
        assert says in str(future.exception()) or "got no answer from rank 0" in str(future.exception())
    assert says in str(first.exception()) and any(says in str(future.exception()) for future in others)


def test_ranks_that_cannot_hear_each_other_are_refused():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = submit(pool, store, 0, 2)
        other = submit(pool, store, 1, 2, interface=NETWORK)
    for future in (first, other):
        assert isinstance(future.exception(), ConfigError)
        assert "rank 0 talks on lo (127.0.0.1), rank 1 on eth0 (10.0.0.1)" in str(future.exception())


def test_ranks_of_another_release_are_refused_by_name(monkeypatch):
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = submit(pool, store, 0, 2)
        while not store.check(["sarathi_pp/name"]):
            time.sleep(0.01)
        monkeypatch.setattr(sarathi_pp, "__version__", "9.9.9")
        other = submit(pool, store, 1, 2)
    for future in (first, other):
        assert str(future.exception()) == "rank 1 has sarathi_pp 9.9.9, rank 0 0.1.0: install one version on all"


def test_who_has_given_up_is_missed():
    """Rank 0 comes late, and does not take an old answer for a rank that waits."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        gone = submit(pool, store, 1, 3, SOON_S)
        first = submit(pool, store, 0, 3, SOON_S + 4)
    assert isinstance(gone.exception(), ConfigError)
    assert "1 of 3 ranks have come within --join-timeout, missing: 1, 2;" in str(first.exception())


@pytest.mark.parametrize(
    "order", [(1, 2, 0), (0, 1, 2), *(pytest.param(more, marks=pytest.mark.full) for more in [(2, 0, 1), (1, 0, 2)])]
)
@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_why_one_does_not_take_part_is_told_to_all(refusing, order):
    """The rank that refuses prints it on its own host, and rank 0 prints it once for the user, in either order."""
    store = HashStore()
    began_s = time.monotonic()
    ranks = {}
    with ThreadPoolExecutor(3) as pool:
        for rank in order:
            refusal = MissingError("no such model: /models/x") if rank == refusing else None
            ranks[rank] = submit(pool, store, rank, 3, refusal=refusal)
            time.sleep(0.3)
    errors = {rank: future.exception() for rank, future in ranks.items()}
    assert {type(error) for error in errors.values()} == {MissingError}
    assert {str(error) for error in errors.values()} == {
        f"rank {refusing} on {socket.gethostname()}: no such model: /models/x"
    }
    assert [errors[rank].agreed for rank in range(3)] == [False, True, True]
    assert time.monotonic() - began_s < LATER_S


def test_rank_0_waits_for_those_that_have_not_come_to_hear_why_it_refuses():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = submit(pool, store, 0, 2, refusal=MissingError("no such file"))
        time.sleep(0.5)
        assert not first.done()
        late = submit(pool, store, 1, 2)
    assert isinstance(first.exception(), MissingError) and isinstance(late.exception(), MissingError)
