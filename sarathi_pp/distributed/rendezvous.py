"""Ranks find each other in a store that may hold entries of an earlier start.

torchrun's static rendezvous keeps one store over its restarts. The ranks of a second start would read addresses of
processes that have ended, and then wait for ever (torch 2.13). So rank 0 draws a name for each start. Every other rank
answers with its own token. At the end rank 0 writes a list of tokens, in which a rank sees whether it takes part:

    rank 0   name = N                         all there?   N/met = [B, C]
    rank 1            N/1 = B                                             B is in it: continue below N
    rank 2            N/2 = C    (of an old N: C is not in it, so look for a new name)

An answer has the number of ranks that this rank expects, and the address at which it talks. If answers do not fit
together, N/met reports this to all ranks. It also passes on the error of a rank that cannot take part. For example, the
host of that rank cannot read the model.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

import sarathi_pp
from sarathi_pp.distributed.environment import INTERFACE_VARIABLE
from sarathi_pp.distributed.network_interface import Interface
from sarathi_pp.errors import ConfigError, SarathiError, error_class
from sarathi_pp.process.activity import Activity
from sarathi_pp.process.timeout import call_with_timeout
from sarathi_pp.trace.clock import Clock

# Seconds between two looks into the store.
_LOOK_S = 0.02
# Most seconds for the other ranks to read rank 0's message that the run does not start.
_HEARD_S = 2.0
# Most seconds for late ranks to come after one rank has refused. The ranks of a job start within a few seconds.
_PATIENCE_S = 30.0
# Most missing ranks that a text names.
_MOST_NAMED = 8
# Extra time for a store that has not answered at the deadline.
_SILENT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The reason why the ranks do not become one run, in the form in which it is sent.

    Attributes:
        kind: name of the error's class.
        agreed: True if a rank has refused to take part, and so has shown this error itself. Of the other ranks, only
            rank 0 then shows it again.
    """

    kind: str
    message: str
    agreed: bool = False

    def error(self) -> SarathiError:
        error = error_class(self.kind)(self.message)
        error.agreed = self.agreed
        return error


def rendezvous(
    store: Store,
    rank: int,
    world_size: int,
    end_s: float,
    clock: Clock,
    interface: Interface,
    refusal: SarathiError | None = None,
    activity: Activity | None = None,
    address: str = "",
) -> Store:
    """Wait until all ranks have come, and return the part of the store that only this start uses.

    Args:
        end_s: time on this clock until which rank 0 waits for the other ranks.
        interface: the network interface on which this rank talks.
        refusal: the error because of which this rank does not take part. All ranks then raise it. None: it takes part.
        activity: on rank 0, its text names the ranks that have not come yet.
        address: address of the rendezvous, for that text.

    Raises:
        ConfigError: ranks are missing or do not fit together. Every rank that has come to rank 0 raises it. Or the
            store does not answer, because the process that holds it is stopped or its host is lost.
        SarathiError: the `refusal` of a rank.
    """
    shared = PrefixStore("sarathi_pp", store)
    own = {"rank": rank, "world_size": world_size, "version": sarathi_pp.__version__, **asdict(interface)}
    own["reach"], own["refusal"] = _reach(interface), None
    if refusal is not None:
        where = f"rank {rank} on {socket.gethostname()}"
        own["refusal"] = asdict(_Refusal(type(refusal).__name__, f"{where}: {refusal}", agreed=True))
    # At the deadline, rank 0 reports the missing ranks to the others. So these wait a little longer than rank 0.
    end_s += _HEARD_S if rank else 0.0
    patience_s = end_s + _HEARD_S + _SILENT_S - clock.now()
    activity = activity or Activity()

    def find() -> str:
        return _answer(shared, own, end_s, clock) if rank else _gather(shared, own, end_s, clock, activity, address)

    try:
        name = call_with_timeout(find, patience_s, late="")
    finally:
        activity.awaited = ""
    if not name:
        raise ConfigError(
            f"rank {rank} of {world_size}: the rendezvous store has not answered within --join-timeout; check that the "
            f"process that holds it, on rank 0's host, is running and can be reached"
        )
    return PrefixStore(name, shared)


def _reach(interface: Interface) -> str:
    """Return a text that is equal for ranks that can reach each other on their interfaces.

    On loopback it names the host and its network namespace. On other interfaces it is empty, so that they count as
    reachable.
    """
    if not interface.is_loopback:
        return ""
    try:
        booted, space = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
    return f"{booted.strip()} {space}"


def _gather(store: Store, own: dict[str, Any], end_s: float, clock: Clock, activity: Activity, address: str) -> str:
    """On rank 0, wait for the answers of all other ranks. Return the name of this start.

    Args:
        own: facts about rank 0, which the answers must fit.
    """
    name, world_size = secrets.token_hex(8), own["world_size"]
    store.set("name", json.dumps({"name": name, "world_size": world_size}))
    ranks = [str(rank) for rank in range(1, world_size)]
    came: dict[str, dict[str, Any]] = {}
    refuse_s: float | None = None
    while not came.keys() >= set(ranks):
        on_time = clock.now() < end_s
        # Read all answers in each round, because a rank that has given up clears its answer.
        strangers = [f"stranger/{number}" for number in range(1, 1 + store.add(f"{name}/strangers", 0))]
        keys = [key for key in (*ranks, *strangers) if store.check([f"{name}/{key}"])]
        answers = {key: store.get(f"{name}/{key}") for key in keys}
        came = {key: json.loads(answer) for key, answer in answers.items() if answer}
        refusal = next(filter(None, (_misfit(own, other) for other in came.values())), None)
        missing = [rank for rank in ranks if rank not in came]
        activity.awaited = _awaited(missing, world_size, address)
        if own["refusal"] is not None:
            refusal = _Refusal(**own["refusal"])
        if refusal is not None and refusal.agreed and missing and on_time:
            # Wait for the ranks that have not come yet, so that they get the refusal too.
            refuse_s = refuse_s or clock.now() + _PATIENCE_S
            if clock.now() < refuse_s:
                clock.sleep(_LOOK_S)
                continue
        if refusal is None and missing and not on_time:
            refusal = _no_fit(
                f"{world_size - len(missing)} of {world_size} ranks have come within --join-timeout, missing: "
                f"{', '.join(missing)}; start all ranks, with the same rendezvous"
            )
        if refusal is not None:
            _tell(store, name, came, refusal)
            _wait_until_heard(store, name, came, clock)
            raise replace(refusal, agreed=False).error()
        if missing:
            clock.sleep(_LOOK_S)
    _tell(store, name, came, None)
    return name


def _awaited(missing: Sequence[str], world_size: int, address: str) -> str:
    """Return a text for the user that names the missing ranks; empty if none is missing."""
    if not missing:
        return ""
    named = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
    where = f" at {address}" if address else ""
    return f"waiting for rank{'s' if len(missing) > 1 else ''} {named} of {world_size}{where}"


def _tell(store: Store, name: str, came: dict[str, dict[str, Any]], refusal: _Refusal | None) -> None:
    """Write the result for the ranks that have come: the tokens of these ranks, and the refusal if there is one."""
    tokens = [one["token"] for one in came.values()]
    said = None if refusal is None else asdict(refusal)
    store.set(f"{name}/met", json.dumps({"tokens": tokens, "refusal": said}))


def _wait_until_heard(store: Store, name: str, came: dict[str, dict[str, Any]], clock: Clock) -> None:
    """Wait until the other ranks have read the refusal, because the store may end with this rank."""
    end_s = clock.now() + _HEARD_S
    while clock.now() < end_s and not store.check([f"{name}/heard/{one['token']}" for one in came.values()]):
        clock.sleep(_LOOK_S)


def _no_fit(message: str) -> _Refusal:
    """Return a refusal because ranks are missing or do not fit together."""
    return _Refusal(ConfigError.__name__, message)


def _misfit(first: dict[str, Any], other: dict[str, Any]) -> _Refusal | None:
    """Return the reason why a rank cannot be in one run with rank 0; None if it can.

    Args:
        first: facts about rank 0.
        other: facts about the rank, from its answer.
    """
    rank = other["rank"]
    if other.get("version") != first["version"]:
        return _no_fit(
            f"rank {rank} has sarathi_pp {other.get('version')}, rank 0 {first['version']}: install one version on all"
        )
    if other["world_size"] != first["world_size"]:
        return _no_fit(
            f"rank {rank} was started as one of {other['world_size']} ranks, rank 0 as one of {first['world_size']}; "
            f"start all with the same number"
        )
    if other.get("refusal") is not None:
        return _Refusal(**other["refusal"])
    if other["reach"] != first["reach"]:
        here, there = (f"{one['name']} ({one['address']})" for one in (first, other))
        return _no_fit(
            f"rank 0 talks on {here}, rank {rank} on {there}, and they do not reach each other; give an address of "
            f"rank 0's host other than loopback (torchrun: --master-addr, --local-addr), or name interfaces in "
            f"{INTERFACE_VARIABLE}"
        )
    return None


def _answer(store: Store, own: dict[str, Any], end_s: float, clock: Clock) -> str:
    """On another rank, answer each name that rank 0 writes, until one start takes this rank. Return its name.

    Args:
        own: facts about this rank.
    """
    token = secrets.token_hex(8)
    answered: dict[str, str] = {}  # key of the answer, by name of the start
    while clock.now() < end_s:
        call = json.loads(store.get("name")) if store.check(["name"]) else None
        if call is not None and call["name"] not in answered:
            # If the runs differ in their number of ranks, rank 0 may not look for this rank's number. So this rank
            # answers as a stranger, which rank 0 looks for too.
            name = call["name"]
            alike = own["world_size"] == call["world_size"]
            key = own["rank"] if alike else f"stranger/{store.add(f'{name}/strangers', 1)}"
            answered[name] = f"{name}/{key}"
            store.set(answered[name], json.dumps({**own, "token": token}))
        if call is not None and store.check([f"{call['name']}/met"]):
            met = json.loads(store.get(f"{call['name']}/met"))
            if token in met["tokens"] and met["refusal"] is None:
                return str(call["name"])
            if token in met["tokens"]:
                store.set(f"{call['name']}/heard/{token}", "")
                raise _Refusal(**met["refusal"]).error()
        clock.sleep(_LOOK_S)
    for key in answered.values():
        store.set(key, "")
    raise ConfigError(
        f"rank {own['rank']} of {own['world_size']} got no answer from rank 0 within --join-timeout; check that rank 0 "
        f"and all other ranks were started"
    )
