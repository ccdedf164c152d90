"""Set up a run step by step on all ranks. An error on one rank is raised on every rank before the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.fingerprint import require_equal
from sarathi_pp.errors import PeerLostError, SarathiError, error_class


@dataclass(slots=True)
class Step:
    """One step of the set-up, in which each rank sends its answer to all ranks."""

    own: dict[str, Any] = field(default_factory=dict)  # this rank's answer, to be set inside the step
    answers: list[dict[str, Any]] = field(default_factory=list)  # answers of all ranks, by rank; empty inside the step


class Agreement:
    """The set-up steps, which every rank takes in the same order.

    with agreement.step("choosing its device") as step:
        step.own = {"gpu": ...}
    gpus = [answer["gpu"] for answer in step.answers]
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    @contextmanager
    def step(self, phase: str, detail: object = "", *, must_match: bool = False) -> Iterator[Step]:
        """Run this rank's part inside the block, and wait for the other ranks at its end.

        The part may compute or read for any time. An error on any rank is raised on all ranks, so that no rank waits
        for a rank that has ended.

        Args:
            phase: the rank's activity, as a phrase that continues "while it was ...".
            detail: the rank's progress, formatted each time it is shown. See Activity.phase.
            must_match: raise ConfigError if the answers of two ranks differ.
        """
        step = Step()
        try:
            with self._plane.phase(phase, detail):
                yield step
        except SarathiError as error:
            answers = self._report(error, {"error": str(error), "class": type(error).__name__})
        except Exception as error:
            # This rank shows the traceback itself. The other ranks only need to know why this rank is gone.
            text = f"{type(error).__name__} while it was {phase}: {error}"
            self._report(error, {"error": text, "class": PeerLostError.__name__})
            raise
        else:
            answers = self._plane.exchange({"answer": step.own})
        failed = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
        # PeerLostError only states that another rank is gone, and not why. So errors of other classes come first.
        failed.sort(key=lambda failure: failure[1]["class"] == PeerLostError.__name__)
        for rank, answer in failed:
            raise self._error_of(rank, answer) from None
        step.answers = [answer["answer"] for answer in answers]
        if must_match:
            require_equal(step.answers)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Run a block that has the same result on every rank. An error is the same on all, so only rank 0 shows it."""
        try:
            yield
        except SarathiError as error:
            error.agreed = True
            raise

    def _report(self, error: Exception, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Report this rank's error to the other ranks, and return the answers of all ranks.

        If a rank does not answer in time, raise the error at once: that rank may hang because of the same problem.
        """
        try:
            return self._plane.exchange(facts, with_timeout=True)
        except PeerLostError:
            raise error from None

    def _error_of(self, rank: int, answer: dict[str, Any]) -> SarathiError:
        """Return the error that a rank has reported in its answer, with the name of that rank in the message."""
        where = f"{self._plane.mesh.title(rank)}: " if self._plane.env.world_size > 1 else ""
        error = error_class(answer["class"])(where + answer["error"])
        error.agreed = True
        return error
