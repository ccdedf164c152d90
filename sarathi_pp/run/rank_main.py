"""One rank's way through a run, whatever it runs: heed signals, join, set up, work, leave, with the right exit code."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sarathi_pp.analysis.replicas import figures
from sarathi_pp.analysis.summary import Analyse
from sarathi_pp.distributed.environment import Place, begun_mark, heeded_mark, mesh_of, stopped_mark
from sarathi_pp.distributed.failure_cause import is_echo, report_cause
from sarathi_pp.errors import EXIT_INTERRUPTED, SarathiError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.sink import OutputClosedError
from sarathi_pp.process.signals import Signals, ignore_signals
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.channel import COMMUNICATING

if TYPE_CHECKING:
    from sarathi_pp.distributed.control_plane import ControlPlane
    from sarathi_pp.run.setup import Job

# What a rank does, a continuation of "while it was ...", and the check, which returns what it has found out besides.
SlowCheck = tuple[str, Callable[[Preflight], Preflight]]


def run_rank(
    checked: Preflight,
    place: Place,
    leave: Callable[[SarathiError], None],
    drive: Callable[[Job, Signals, Preflight], Mapping[str, Any]],
    located: Callable[[RunDirectory], None] = lambda run_dir: None,
    analyse: Analyse = figures,
    slow: Sequence[SlowCheck] = (),
) -> dict[str, Any] | None:
    """Join, set up, let `drive` do this rank's work, leave; rank 0 gets the report, with what `drive` returned.

    slow: checks that may take long, done once all ranks have joined.
    """
    watchdog = Watchdog(leave)
    if place.launcher is not None:
        watchdog.follow_parent(place.launcher, Path(place.store).parent if place.store is not None else None)
    launched = place.store is not None and place.rank > 0
    where = mesh_of(checked.config).title(place.rank)
    signals = Signals(where, watchdog.end_within, launched=launched, hurried=place.under_torchrun)
    try:
        with signals.heeded():
            if place.store is not None and place.rank == 0:
                heeded_mark(place.store).touch()
            topology, checked = _join(checked, place, slow)
            return _run_joined(
                checked, topology, watchdog, lambda this: drive(this, signals, checked), located, analyse
            )
    finally:
        watchdog.close()
        if place.store is not None and signals.asked() is not None:
            stopped_mark(place.store).touch()


def _join(checked: Preflight, place: Place, slow: Sequence[SlowCheck]) -> tuple[ControlPlane, Preflight]:
    """Join the other ranks, then do the slow checks, for which they wait as long as those get on."""
    with _uncollected():
        from sarathi_pp.distributed.agreement import Agreement
        from sarathi_pp.distributed.control_plane import ControlPlane

        config = checked.config
        topology = ControlPlane.join(place, config.join_timeout_s, config.peer_timeout_s, mesh_of(config))
    for phase, check in slow:
        checked = Agreement(topology).own(partial(check, checked), phase)
    return topology, checked


def _run_joined(
    checked: Preflight,
    topology: ControlPlane,
    watchdog: Watchdog,
    drive: Callable[[Job], Mapping[str, Any]],
    located: Callable[[RunDirectory], None],
    analyse: Analyse,
) -> dict[str, Any] | None:
    place, config = topology.place, checked.config
    with _uncollected():
        from sarathi_pp.run.setup import Job

        model_dir = checked.model_dir or Path()
        this = Job(
            config,
            model_dir,
            checked.facts,
            topology,
            checked.run_dir,
            SystemClock(),
            watchdog,
            located,
            checked.profile,
        )
    if place.store is not None and place.rank == 0:
        begun_mark(place.store).touch()
    try:
        facts = drive(this)
        report = this.finish(analyse, facts)
    except BaseException:
        this.abandon()
        raise
    topology.leave()
    return report


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is made inside stays for good: 370,000 objects of libraries.

    The collector would walk them again and again while they are made, a fifth of the time that it takes to import them,
    and later stop the stage for 0.25 s a time.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def end(
    work: Callable[[], int], place: Place, where: str, say: Callable[[str], None], note: Callable[[int], None]
) -> int:
    """Do the work and return its exit code, which `note` writes down; an error is said once, with where it happened.

    A rank among others that ends by an error does not come back from here, nor one that has lost a replica: its
    communication threads are still inside gloo, and an interpreter that is torn down under them aborts. Once the work
    is over signals are ignored: the exit code is the one that was noted.
    """
    message = ""
    try:
        try:
            code = work()
        finally:
            ignore_signals()
        note(code)
        if _communicates():
            _leave(code)
        return code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OutputClosedError as error:
        code = error.exit_code  # whoever read our output has left, and needs no message
    except SarathiError as error:
        code = error.exit_code
        spoken = is_echo(error, place) or (place.rank != 0 and error.agreed)
        message = "" if spoken else f"{type(error).__name__}: {error}"
    except Exception:
        code = SarathiError.exit_code
        message = (f"{where} failed:\n" if place.world_size > 1 else "") + traceback.format_exc()
    try:
        report_cause(place)
        note(code)  # first: a message may have to wait for whoever reads it
        if message:
            say(message)
    finally:
        if place.world_size > 1:
            _leave(code)
    return code


def _communicates() -> bool:
    return any(thread.name.startswith(COMMUNICATING) for thread in threading.enumerate())


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
