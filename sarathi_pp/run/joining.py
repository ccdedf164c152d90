"""Make a process a rank of a run: join the other ranks, set up, and leave them in order.

torch is imported when it is first needed, after the checks that do not need it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.environment import RankEnvironment, begun_mark, mesh_of
from sarathi_pp.process.activity import Activity
from sarathi_pp.run.ending import Ending
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.trace.clock import SystemClock

if TYPE_CHECKING:
    from sarathi_pp.distributed.control_plane import ControlPlane
    from sarathi_pp.run.rank import Rank


@contextmanager
def joined(env: RankEnvironment, config: RunConfig, activity: Activity | None = None) -> Iterator[ControlPlane]:
    """Join the other ranks, and yield the control plane, over which they talk. Close it after the block.

    After an error in the block, it stays open. The process then ends, or its program closes everything itself.

    Args:
        activity: gets the phases of this rank until it is set up.

    Raises:
        ConfigError: a rank does not join.
    """
    activity = activity or Activity()
    with _uncollected():
        with activity.phase("loading libraries"):
            from sarathi_pp.distributed.control_plane import ControlPlane

        plane = ControlPlane.join(env, config.join_timeout_s, config.peer_timeout_s, mesh_of(config), activity)
    yield plane
    plane.leave()


@contextmanager
def ready(checked: Preflight, plane: ControlPlane, ending: Ending) -> Iterator[Rank]:
    """Set this rank up, and yield it. If one rank has an error in a common step (Agreement.step), all ranks raise it.

    After an error in the block, the trace of this rank is closed and kept.
    """
    with _uncollected():
        with plane.phase("loading libraries"):
            from sarathi_pp.run.rank import set_up
            from sarathi_pp.run.setup import Member, agree_on_start

        member = Member(checked, plane, ending.watchdog, SystemClock())
        start = agree_on_start(member)
        ending.run_dir = start.run_dir
        rank = set_up(member, start)
    if ending.env.store is not None and ending.env.rank == 0:
        begun_mark(ending.env.store).touch()
    try:
        yield rank
    except BaseException:
        rank.abandon()
        raise


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector inside the block, and never collect the objects that are made there.

    Libraries make 370,000 objects that stay until the process ends. The collector would walk them repeatedly, for a
    fifth of the import time. Later it would stop the stage for 0.25 s each time.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
