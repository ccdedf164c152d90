"""Set up a run step by step on all ranks: an error on one rank is raised on every rank, before any goes on."""

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
    """One step of the set-up."""

    own: dict[str, Any] = field(default_factory=dict)  # this rank's answer, to be set inside the step
    answers: list[dict[str, Any]] = field(default_factory=list)  # of every rank, by rank; complete after the step


class Agreement:
    """Every rank takes the same steps in the same order.

    with agreement.step("choosing its device") as step:
        step.own = {"gpu": ...}
    gpus = [answer["gpu"] for answer in step.answers]
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    @contextmanager
    def step(self, phase: str, detail: object = "", *, must_match: bool = False) -> Iterator[Step]:
        """Do this rank's part inside, which may compute or read for any time. Wait for the others on leaving.

        An error on any rank is raised on all, so that no rank waits for one that left.

        Args:
            phase: what a rank does meanwhile; continues "while it was ...".
            detail: how far it is, formatted whenever somebody looks. See Activity.phase.
            must_match: raise ConfigError if two answers differ.
        """
        step = Step()
        try:
            with self._plane.phase(phase, detail):
                yield step
        except SarathiError as error:
            answers = self._report(error, {"error": str(error), "class": type(error).__name__})
        except Exception as error:
            # It has a traceback to show. The other ranks only have to know why this one leaves.
            text = f"{type(error).__name__} while it was {phase}: {error}"
            self._report(error, {"error": text, "class": PeerLostError.__name__})
            raise
        else:
            answers = self._plane.exchange({"answer": step.own})
        failed = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
        # A rank that only notices that another rank is gone does not say why.
        failed.sort(key=lambda failure: failure[1]["class"] == PeerLostError.__name__)
        for rank, answer in failed:
            raise self._error_of(rank, answer) from None
        step.answers = [answer["answer"] for answer in answers]
        if must_match:
            require_equal(step.answers)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Do inside what every rank does with the same result. An error is then the same on all; rank 0 shows it."""
        try:
            yield
        except SarathiError as error:
            error.agreed = True
            raise

    def _report(self, error: Exception, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Report an error to the other ranks. Raises it if one of them does not come: it may be stuck because of it."""
        try:
            return self._plane.exchange(facts, with_timeout=True)
        except PeerLostError:
            raise error from None

    def _error_of(self, rank: int, answer: dict[str, Any]) -> SarathiError:
        where = f"{self._plane.mesh.title(rank)}: " if self._plane.env.world_size > 1 else ""
        error = error_class(answer["class"])(where + answer["error"])
        error.agreed = True
        return error
