"""How ranks set up together: each does its part, and all hear of it before any goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sarathi_pp.errors import SarathiError, error_class
from sarathi_pp.runtime.passport import require_equal
from sarathi_pp.runtime.topology import Topology

T = TypeVar("T")


class Agreement:
    """Every rank calls the same in the same order. What one of them raises is raised by all."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def each(self, work: Callable[[], dict[str, Any]], *, must_match: bool = False) -> list[dict[str, Any]]:
        """Every rank's answer; an error on any of them is raised on all, so that none waits for one that left.

        must_match: raises ConfigError where two answers differ.
        """
        try:
            mine: dict[str, Any] = {"answer": work()}
        except SarathiError as error:
            mine = {"error": str(error), "class": type(error).__name__}
        answers = self._topology.exchange(mine)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise self._told_by(rank, answer)
        facts = [answer["answer"] for answer in answers]
        if must_match:
            require_equal(facts)
        return facts

    def alike(self, work: Callable[[], T]) -> T:
        """What every rank does alike; an error is then the same on all of them, and rank 0's to show."""
        try:
            return work()
        except SarathiError as error:
            error.agreed = True
            raise

    def _told_by(self, rank: int, answer: dict[str, Any]) -> SarathiError:
        where = f"{self._topology.mesh.title(rank)}: " if self._topology.place.world_size > 1 else ""
        error = error_class(answer["class"])(where + answer["error"])
        error.agreed = True
        return error
