"""Ranks find each other in a store that may hold what an earlier start has left.

torchrun's static rendezvous keeps one store over its restarts, and the ranks of a second start would read addresses of
processes that have ended (torch 2.13; they then wait for ever). So rank 0 draws a name for each start, every other rank
answers with one of its own, and what rank 0 writes down at the end of it shows a rank whether it was meant:

    rank 0   name = N                         all there?   N/met = [B, C]
    rank 1            N/1 = B                                             B is in it: go on below N
    rank 2            N/2 = C    (of an old N: C is not in it, so look for a new name)
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import Clock

_LOOK_S = 0.02


def meet(store: Store, rank: int, world_size: int, timeout: timedelta, clock: Clock) -> Store:
    """The part of the store that belongs to this start alone; returns when all ranks are there.

    Raises PeerLostError, on rank 0 with the ranks that are missing.
    """
    end_s = clock.now() + timeout.total_seconds()
    shared = PrefixStore("sarathi_pp", store)
    name = (_call if rank == 0 else _answer)(shared, rank, world_size, lambda: clock.now() < end_s, clock)
    return PrefixStore(name, shared)


def _call(store: Store, rank: int, world_size: int, in_time: Callable[[], bool], clock: Clock) -> str:
    name = secrets.token_hex(8)
    store.set("name", name)
    missing = list(range(1, world_size))
    while missing := [one for one in missing if not store.check([f"{name}/{one}"])]:
        if not in_time():
            raise PeerLostError(
                f"{world_size - len(missing)} of {world_size} ranks have come, missing: "
                f"{', '.join(map(str, missing))}; were all started, with the same rendezvous?"
            )
        clock.sleep(_LOOK_S)
    store.set(f"{name}/met", json.dumps([store.get(f"{name}/{one}").decode() for one in range(1, world_size)]))
    return name


def _answer(store: Store, rank: int, world_size: int, in_time: Callable[[], bool], clock: Clock) -> str:
    mine, answered = secrets.token_hex(8), set[str]()
    while in_time():
        name = store.get("name").decode() if store.check(["name"]) else None
        if name is not None and name not in answered:
            store.set(f"{name}/{rank}", mine)
            answered.add(name)
        if name is not None and store.check([f"{name}/met"]) and mine in json.loads(store.get(f"{name}/met")):
            return name
        clock.sleep(_LOOK_S)
    raise PeerLostError(f"rank {rank} of {world_size} was not met by rank 0; was that one started, and all others?")
