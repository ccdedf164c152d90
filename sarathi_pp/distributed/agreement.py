"""How ranks set up together: each does its part, and all hear of it before any goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.fingerprint import require_equal
from sarathi_pp.errors import PeerLostError, SarathiError, error_class

T = TypeVar("T")


class Agreement:
    """Every rank calls the same in the same order. What one of them raises is raised by all."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def each(self, work: Callable[[], dict[str, Any]], phase: str, *, must_match: bool = False) -> list[dict[str, Any]]:
        """Return every rank's answer; an error on any of them is raised on all, so that none waits for one that left.

        Args:
            work: may take as long as it computes or reads.
            phase: what a rank does meanwhile, a continuation of "while it was ...".
            must_match: raise ConfigError if two answers differ.
        """
        try:
            with self._plane.phase(phase):
                mine: dict[str, Any] = {"answer": work()}
        except SarathiError as error:
            answers = self._after(error, {"error": str(error), "class": type(error).__name__})
        except Exception as error:
            # It has a traceback to show; the others only have to know why this rank leaves.
            text = f"{type(error).__name__} while it was {phase}: {error}"
            self._after(error, {"error": text, "class": PeerLostError.__name__})
            raise
        else:
            answers = self._plane.exchange(mine)
        failed = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
        # A rank that only notices that another one is gone does not say why.
        failed.sort(key=lambda one: one[1]["class"] == PeerLostError.__name__)
        for rank, answer in failed:
            raise self._told_by(rank, answer)
        facts = [answer["answer"] for answer in answers]
        if must_match:
            require_equal(facts)
        return facts

    def _after(self, error: Exception, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell the others of an error; raises it if one of them does not come, which may be stuck because of it."""
        try:
            return self._plane.exchange(mine, with_timeout=True)
        except PeerLostError:
            raise error from None

    def own(self, work: Callable[[], T], phase: str) -> T:
        """Return what this rank's work returns, once every rank has done its own. See `each`."""
        done: list[T] = []

        def do() -> dict[str, Any]:
            done.append(work())
            return {}

        self.each(do, phase)
        return done[0]

    def alike(self, work: Callable[[], T]) -> T:
        """What every rank does alike; an error is then the same on all of them, and rank 0's to show."""
        try:
            return work()
        except SarathiError as error:
            error.agreed = True
            raise

    def _told_by(self, rank: int, answer: dict[str, Any]) -> SarathiError:
        where = f"{self._plane.mesh.title(rank)}: " if self._plane.place.world_size > 1 else ""
        error = error_class(answer["class"])(where + answer["error"])
        error.agreed = True
        return error
