"""Measure the gain of each change of the code: several commits do the same work in turn.

    python examples/benchmarks/make_254m.py /tmp/m254
    python examples/benchmarks/measure_commits.py --model /tmp/m254 --commit a44db26 --commit c1cdb6a \
        --output docs/benchmarks/results/commits.json

The folders `sarathi_pp` and `kernels` of each commit are extracted to a directory of their own. This Python runs them
with the installed libraries, on two stages with one compute thread each. Every second round goes backwards. Before the
rounds, one uncounted run of each commit compiles its kernels.

The document has, for each commit, medians and extremes of its figures, and the figures of each round. Two figures
compare a commit with the one named before it, in the same round: the ratio of tokens per second, and the share of
requests with the same tokens. In bfloat16, another order of summation may change tokens. To see the noise, name two
commits between which `sarathi_pp` did not change. The document is written after every round. Medians, extremes and
ratios are over the undisturbed rounds (rounds.py). Disturbed rounds are in the document too, with a mark.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from record import ROOT, Record, spread
from rounds import describe_rounds, disturbed_rounds, hold_undisturbed, missing_rounds

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench.contest import OurRun, Run, TokenIds, Work, hold
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.distributed.environment import inherited
from sarathi_pp.sim.workload import parse_workload

DECODES = "uniform:n=32,min=64,max=128,output=64"
SEQS = 32
GAIN, SAME = "tokens/s, of the one before", "same tokens as the one before"


@dataclass(frozen=True, slots=True)
class CommitRun(OurRun):
    """A run of `generate` with the code of one commit. Its label is the commit's name.

    Attributes:
        tree: directory with the code, which also gets the answers.
    """

    tree: Path

    def environment(self, work: Work) -> dict[str, str]:
        return self._path

    @property
    def _path(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join((str(self.tree), str(self.tree / "kernels")))}

    def _answers(self, work: Work) -> Path:
        # Each commit has its own output: older code does not replace a directory with files that it does not know.
        return self.tree / "answers.jsonl"

    @classmethod
    def lay_out(cls, commit: str, arguments: tuple[str, ...], directory: Path) -> CommitRun:
        """Extract the code of a commit.

        Raises:
            click.ClickException: the commit lacks a package, or this Python would run other files.
        """
        run = cls(commit, arguments, directory / commit)
        found = subprocess.run(
            ("git", "-C", str(ROOT), "archive", commit, "sarathi_pp", "kernels"), capture_output=True
        )
        if found.returncode:
            raise click.ClickException(f"cannot extract {commit}: {found.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as files:
            files.extractall(run.tree, filter="data")
        run._check()
        return run

    def _check(self) -> None:
        for package, folder in (("sarathi_pp", self.tree), ("sarathi_pp_kernels", self.tree / "kernels")):
            command = (sys.executable, "-P", "-c", f"import {package}; print({package}.__path__[0])")
            found = subprocess.run(command, env=inherited(self._path), capture_output=True, text=True, check=True)
            taken = found.stdout.strip()
            if Path(taken) != folder / package:
                raise click.ClickException(f"{self.label} would run {taken}, not the code in {self.tree}")


def figures_of(report: Report) -> dict[str, float]:
    """Return the compared figures of a report. "host, s": time that all stages lose to the cause `host`."""
    return {
        "tokens/s": report["total_tokens_per_s"],
        "steady bubble": report["bubble_ratio_steady"],
        "compute, s": sum(stage["compute_s"] for stage in report["per_stage"]),
        "host, s": report["causes"]["host_s"],
    }


def compare(commits: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each commit, in the order of the commits.

    Without an undisturbed round, a commit has no medians and extremes.

    Args:
        runs: in the order of the rounds, with the same number of rounds for each commit.
    """
    disturbed = disturbed_rounds(runs)
    of = {commit: [run for run in runs if run.entrant == commit] for commit in commits}
    found: list[dict[str, Any]] = []
    for before, commit in zip((None, *commits), commits, strict=False):
        each = [{**figures_of(run.report), "stolen": run.stolen} for run in of[commit]]
        if before is not None:
            for row, a, b in zip(each, of[before], of[commit], strict=True):
                row[GAIN] = b.report["total_tokens_per_s"] / a.report["total_tokens_per_s"]
                row[SAME] = _same(a.token_ids, b.token_ids)
        counted = [row for row, run in zip(each, of[commit], strict=True) if run.round not in disturbed]
        spreads = {name: spread([row[name] for row in counted]) for name in each[0] if counted}
        marked = [{**row, "disturbed": run.round in disturbed} for row, run in zip(each, of[commit], strict=True)]
        found.append({"commit": commit, **spreads, "rounds": marked})
    return found


def _same(before: TokenIds, after: TokenIds) -> float:
    return sum(one == other for one, other in zip(before, after, strict=True)) / len(before)


def resolve(commit: str) -> dict[str, str]:
    """Return the short name and the subject of a commit.

    Raises:
        click.ClickException: git does not know the commit.
    """
    command = ("git", "-C", str(ROOT), "show", "--no-patch", "--format=%h%n%s", f"{commit}^{{commit}}")
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise click.ClickException(f"--commit {commit}: {found.stderr.strip()}")
    name, subject = found.stdout.strip().split("\n", 1)
    return {"commit": name, "subject": subject}


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--commit", "named", multiple=True, required=True, help="A commit. Give two or more, in order.")
@click.option("--workload", default=DECODES, show_default=True)
@click.option("--policy", default="balanced", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True, help="Undisturbed rounds.")
@click.option("--output", type=click.Path(path_type=Path))
def main(model: Path, named: tuple[str, ...], workload: str, policy: str, rounds: int, output: Path | None) -> None:
    subjects = {one["commit"]: one["subject"] for one in map(resolve, named)}
    commits = tuple(subjects)
    if len(commits) != len(named) or len(commits) < 2:
        raise click.UsageError(f"--commit: give two or more different commits; got {', '.join(named)}")
    record, facts = Record.begin(), check_model(model)
    requests = list(parse_workload(workload).requests(vocabulary=facts.vocab_size))
    runs: list[Run] = []

    with TemporaryDirectory() as scratch:
        arguments = ("--stages", "2", "--policy", policy)
        entrants = [CommitRun.lay_out(commit, arguments, Path(scratch)) for commit in commits]
        work = Work(model, facts.dtype, requests, SEQS, Path(scratch))
        for _ in hold(work, entrants, 1):  # fill the caches for the later runs
            pass
        for run in hold_undisturbed(work, entrants, rounds):
            _say(run)
            runs.append(run)
            if len(runs) % len(commits) == 0:
                rows = [{**row, "subject": subjects[row["commit"]]} for row in compare(commits, runs)]
                given = {"model": str(model), "workload": workload, "policy": policy}
                record.write(output, {**given, **describe_rounds(runs, rounds), "commits": rows})
    rows = compare(commits, runs)
    print(json.dumps([{name: row[name] for name in row if name != "rounds"} for row in rows], indent=1))
    if (missing := missing_rounds(runs, rounds)) is not None:
        click.echo(missing, err=True)


def _say(run: Run) -> None:
    print(
        run.round,
        run.entrant,
        *(f"{name} {figure:.4g}" for name, figure in figures_of(run.report).items()),
        f"stolen {run.stolen:.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
