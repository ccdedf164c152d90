"""The heartbeats of ranks while a run is set up. A slow rank is not a dead one.

    each rank, every second          alive/3 = beat 41, work 970, "loading its layers: 3.1 of 35.8 GiB"     in the store
    a rank that waits for rank 3     reads it. No new beat within its patience: stopped. No new work: it hangs.

A rank that loads from a cold disk, scans an input or compiles may take any time. Work is a count of processor time and
bytes read. So a rank that waits for ever is noticed, although its heartbeats continue.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sarathi_pp.errors import PeerLostError
from sarathi_pp.process.activity import Activity
from sarathi_pp.process.timeout import call_with_timeout
from sarathi_pp.trace.clock import Clock
from sarathi_pp.wire.edge_options import heartbeat_s

# Processor time in seconds, and bytes read, that count as work. A process that only waits takes less.
_WORK_S = 0.05
_WORK_BYTES = 1 << 20
# Most seconds for the store to answer. The store of a lost host would never answer.
_ANSWER_S = 2.0
# Threads of libraries that wake up or answer other ranks, even in a process that hangs.
_IDLE_THREADS = ("gloo", "pt_tcpstore", "pt_nccl")


class Store(Protocol):
    """A key-value store that ranks share: the methods of torch's stores that are used here."""

    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...


class Presence:
    """This rank's heartbeats in the store, and the last ones that it saw of the others.

    Args:
        store: the part of the store that only this start of the run uses.
        names: names of all ranks, for messages.
        patience_s: seconds for which a rank may be silent, or may do nothing.
        activity: this rank's current activity. It is sent with each heartbeat.

    Attributes:
        every_s: seconds between two heartbeats.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        patience_s: float,
        clock: Clock,
        activity: Activity | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._patience_s = patience_s
        self._clock = clock
        self.every_s = heartbeat_s(patience_s)
        self._activity = activity or Activity()
        self._seen: dict[int, _Seen] = {}
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Send a heartbeat now, because this rank starts another phase."""
        self._wake.set()

    def forget(self) -> None:
        """Forget the heartbeats seen so far, before another wait.

        A rank that has waited for this one has done no work meanwhile. It must not count as a rank that hangs.
        """
        self._seen.clear()

    def awaited(self, ranks: Sequence[int]) -> str:
        """Return a text that names these ranks, with the first one's phase from its last heartbeat."""
        first, *others = ranks
        more = f" and {len(others)} more" if others else ""
        phase = self._seen[first].phase if first in self._seen else ""
        return f"waiting for {self._names[first]}{more}" + (f": {phase}" if phase else "")

    def close(self) -> None:
        """Stop the heartbeats in the store, because from now on each edge between ranks carries its own."""
        self._ended = True
        self._wake.set()
        self._thread.join(_ANSWER_S)

    def check(self, ranks: Collection[int]) -> None:
        """Check the heartbeats of ranks that this one waits for.

        Raises:
            PeerLostError: one of them has been silent, or has done nothing, for too long.
        """
        nothing: dict[int, tuple[str, str, str]] = {}
        beats = call_with_timeout(lambda: self._read(ranks), _ANSWER_S, late=nothing)
        now_s = self._clock.now()
        for rank in ranks:
            beat, work, phase = beats.get(rank, ("", "", ""))
            seen = self._seen.setdefault(rank, _Seen(heard_s=now_s, worked_s=now_s))
            if beat not in ("", seen.beat):
                seen.beat, seen.heard_s, seen.phase = beat, now_s, phase
            if work not in ("", seen.work):
                seen.work, seen.worked_s = work, now_s
            where = f" while it was {seen.phase}" if seen.phase else ""
            if now_s - seen.heard_s > self._patience_s:
                raise PeerLostError(
                    f"{self._names[rank]} has been silent for more than {self._patience_s:g} s{where}: it is stopped, "
                    f"or its host or network is gone"
                )
            if now_s - seen.worked_s > self._patience_s:
                raise PeerLostError(
                    f"{self._names[rank]} has neither computed nor read anything for more than "
                    f"{self._patience_s:g} s{where}: it hangs"
                )

    def _read(self, ranks: Collection[int]) -> dict[int, tuple[str, str, str]]:
        """Return the beat, work and phase of each rank's last heartbeat, by rank."""
        found = {}
        for rank in ranks:
            if self._store.check([f"alive/{rank}"]):
                beat, work, phase = self._store.get(f"alive/{rank}").decode().split("\n")
                found[rank] = beat, work, phase
        return found

    def _run(self) -> None:
        """Write heartbeats into the store until `close`."""
        beat = 0
        with suppress(RuntimeError):  # the store is gone: the rank that holds it has left
            while not self._ended:
                beat += 1
                self._store.set(f"alive/{self._rank}", f"{beat}\n{_work(beat)}\n{self._activity.own}")
                self._wake.wait(self.every_s)
                self._wake.clear()


@dataclass(slots=True)
class _Seen:
    """A rank's last beat, work and phase, and the times at which beat and work were first seen."""

    heard_s: float
    worked_s: float
    beat: str = ""
    work: str = ""
    phase: str = ""


def _work(beat: int) -> str:
    """Return a text that changes while this process works. Without /proc, each beat counts as work."""
    if not Path("/proc/self/task").is_dir():
        return str(beat)
    seconds, num_read = _done()
    return f"{int(seconds / _WORK_S)} {num_read // _WORK_BYTES}"


def _done() -> tuple[float, int]:
    """Return the processor time in seconds and the bytes read of this process's threads.

    This thread does not count. Threads of libraries that stay busy in a process that hangs do not count either.
    """
    ticks = num_read = 0
    threads: list[str] = []
    with suppress(OSError):
        threads = os.listdir("/proc/self/task")
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):
            folder = Path("/proc/self/task", thread)
            name, _, fields = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            if not any(idle in name for idle in _IDLE_THREADS) and int(thread) != threading.get_native_id():
                ticks += sum(map(int, fields.split()[11:13]))  # utime and stime
                num_read += int((folder / "io").read_text().split()[1])  # rchar
    return ticks / os.sysconf("SC_CLK_TCK"), num_read
