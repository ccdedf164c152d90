"""What each change of the code was worth: the same work by several commits' code, in turn.

    python examples/benchmarks/make_254m.py /tmp/m254
    python examples/benchmarks/measure_commits.py --model /tmp/m254 --commit a44db26 --commit c1cdb6a \
        --output docs/benchmarks/commits.json

Each commit's `sarathi_pp` and `kernels` are laid out by themselves and run by this Python with the libraries of now, on
two stages with a compute thread each, in rounds of which every second goes backwards. A run of each before them, in
which its kernels are compiled, is not counted. Of each commit: medians and extremes of its figures, what it has of the
tokens a second of the one named before it, in the same round, and to how many of the requests it gave the same tokens
as that one; then each round's. In bfloat16 a sum that is made in another order may give others. Two commits between
which `sarathi_pp` did not change tell what the same code differs by. Written after every round.
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

from sarathi_pp.analysis.summary import Report
from sarathi_pp.bench.contest import OurRun, Run, TokenIds, Work, hold
from sarathi_pp.distributed.environment import inherited
from sarathi_pp.model.checkpoint.support import check_model
from sarathi_pp.sim.workload import parse_workload

DECODES = "uniform:n=32,min=64,max=128,output=64"
SEQS = 32
GAIN, SAME = "tokens/s, of the one before", "same tokens as the one before"


@dataclass(frozen=True, slots=True)
class CommitRun(OurRun):
    """`generate` of the code that lies in `tree`, with what it writes; the label is the commit's name."""

    tree: Path

    def environment(self, work: Work) -> dict[str, str]:
        return self._path

    @property
    def _path(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join((str(self.tree), str(self.tree / "kernels")))}

    def _answers(self, work: Work) -> Path:
        # Of its own: older code replaces no directory in which it finds files that it does not know.
        return self.tree / "answers.jsonl"

    @classmethod
    def lay_out(cls, commit: str, arguments: tuple[str, ...], directory: Path) -> CommitRun:
        """Raises click.ClickException where the commit lacks a package, or this Python would run other files."""
        run = cls(commit, arguments, directory / commit)
        found = subprocess.run(
            ("git", "-C", str(ROOT), "archive", commit, "sarathi_pp", "kernels"), capture_output=True
        )
        if found.returncode:
            raise click.ClickException(f"{commit} is not laid out: {found.stderr.decode().strip()}")
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
                raise click.ClickException(f"{self.label} would run {taken}, not what was laid out in {self.tree}")


def figures_of(report: Report) -> dict[str, float]:
    """host: what the stages wait while the first one's program plans, sends and takes in; of all stages, in seconds."""
    return {
        "tokens/s": report["total_tokens_per_s"],
        "steady bubble": report["bubble_ratio_steady"],
        "compute, s": sum(stage["compute_s"] for stage in report["per_stage"]),
        "host, s": report["causes"]["host_s"],
    }


def compare(commits: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """In the order of the commits; runs: each commit's in the order of the rounds, all of as many."""
    of = {commit: [run for run in runs if run.entrant == commit] for commit in commits}
    found: list[dict[str, Any]] = []
    for before, commit in zip((None, *commits), commits, strict=False):
        each = [{**figures_of(run.report), "stolen": run.stolen} for run in of[commit]]
        if before is not None:
            for row, a, b in zip(each, of[before], of[commit], strict=True):
                row[GAIN] = b.report["total_tokens_per_s"] / a.report["total_tokens_per_s"]
                row[SAME] = _same(a.token_ids, b.token_ids)
        spreads = {name: spread([row[name] for row in each]) for name in each[0]}
        found.append({"commit": commit, **spreads, "rounds": each})
    return found


def _same(before: TokenIds, after: TokenIds) -> float:
    return sum(one == other for one, other in zip(before, after, strict=True)) / len(before)


def resolve(commit: str) -> dict[str, str]:
    """Raises click.ClickException where git knows no such commit."""
    command = ("git", "-C", str(ROOT), "show", "--no-patch", "--format=%h%n%s", f"{commit}^{{commit}}")
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise click.ClickException(f"--commit {commit}: {found.stderr.strip()}")
    name, subject = found.stdout.strip().split("\n", 1)
    return {"commit": name, "subject": subject}


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--commit", "named", multiple=True, required=True, help="Two or more, in order.")
@click.option("--workload", default=DECODES, show_default=True)
@click.option("--policy", default="balanced", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: Path, named: tuple[str, ...], workload: str, policy: str, rounds: int, output: Path | None) -> None:
    subjects = {one["commit"]: one["subject"] for one in map(resolve, named)}
    commits = tuple(subjects)
    if len(commits) != len(named) or len(commits) < 2:
        raise click.UsageError(f"--commit names two or more, each once; got {', '.join(named)}")
    record, facts = Record.begin(), check_model(model)
    requests = list(parse_workload(workload).requests(vocabulary=facts.vocab_size))
    runs: list[Run] = []

    with TemporaryDirectory() as scratch:
        arguments = ("--stages", "2", "--policy", policy)
        entrants = [CommitRun.lay_out(commit, arguments, Path(scratch)) for commit in commits]
        work = Work(model, facts.dtype, requests, SEQS, Path(scratch))
        for _ in hold(work, entrants, 1):  # warms up what later runs find in caches
            pass
        for run in hold(work, entrants, rounds):
            _say(run)
            runs.append(run)
            if len(runs) % len(commits) == 0:
                rows = [{**row, "subject": subjects[row["commit"]]} for row in compare(commits, runs)]
                given = {"model": str(model), "workload": workload, "policy": policy}
                record.write(output, {**given, "rounds": run.round + 1, "commits": rows})
    rows = compare(commits, runs)
    print(json.dumps([{name: row[name] for name in row if name != "rounds"} for row in rows], indent=1))


def _say(run: Run) -> None:
    print(
        run.round, run.entrant, *(f"{name} {figure:.4g}" for name, figure in figures_of(run.report).items()), flush=True
    )


if __name__ == "__main__":
    main()
