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
    """The traces and facts that rank 0 has after every rank has closed its trace.

    Attributes:
        traces: paths of the traces: for each replica that is left, one per stage.
        facts: contents of the report that no trace holds.
        lost: the error of each replica that was lost before the end of the run, by its index.
    """

    traces: Sequence[Sequence[Path]]
    facts: Mapping[str, Any]
    run_dir: RunDirectory
    lost: Mapping[int, SarathiError]

    def keep(self, reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Write each report to the run directory, and return the last one.

        Each report contains more than the one before, and is written before the next one is made. If the process is
        ended in between, the earlier one is on disk.
        """
        last: dict[str, Any] | None = None
        for last in map(self.counted, reports):
            self.run_dir.write_report(last)
        assert last is not None, "a fold of traces gives one report at least"
        return last

    def counted(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report with a number of requests that includes those of lost replicas.

        The report was made from traces, and does not use the traces of lost replicas.
        """
        if not self.lost:
            return report
        return report | {"requests": max(report["requests"], report["completed"] + report["failed"])}
