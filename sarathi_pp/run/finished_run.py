"""The result of a run on rank 0: its traces, and the facts that no trace holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_pp.errors import SarathiError
from sarathi_pp.outputs.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What rank 0 has once every rank has closed its trace.

    traces: of each replica that is left, one a stage. facts: what the report is to say besides. lost: replicas that
    have ended before the run did.
    """

    traces: Sequence[Sequence[Path]]
    facts: Mapping[str, Any]
    run_dir: RunDirectory
    lost: Mapping[int, SarathiError]

    def keep(self, reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Write each report, of which one says more than the one before, and return the last.

        Each is written before the next is asked for: whoever ends the process by then has that one.
        """
        last: dict[str, Any] | None = None
        for last in reports:
            if self.lost:
                # Answers are counted as they are written; those of a lost replica are requests that no trace tells of.
                last["requests"] = max(last["requests"], last["completed"] + last["failed"])
            self.run_dir.write_report(last)
        assert last is not None, "a fold of traces gives one report at least"
        return last
