"""From a process to a rank of a run: join the others, set up, and leave them in order.

Imports torch where it is first needed, behind the checks that do without it.
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
    """Join the other ranks, and leave them if all went well.

    After an error inside, the plane stays open. The process ends, or its program closes everything itself.

    Args:
        activity: gets the phases of this rank until it is set up.

    Raises:
        ConfigError: a rank does not come.
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
    """Set this rank up. In a step of the agreement, what any rank finds wrong is raised on all."""
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
