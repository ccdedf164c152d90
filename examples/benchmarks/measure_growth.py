"""Measure how the figures of a run grow with stages, requests in flight, prompt length and lines of input.

    python examples/benchmarks/measure_growth.py --work-dir /tmp/m300 --output docs/benchmarks/results/growth.json

stages      1 and 2 real stages, and 1 to 8 stages that sleep the times of a profile (`--emulate`). 32 prompts of 256 to
            1,024 tokens, P:D 8
in flight   1 to 512 requests at once, prompts of 64 to 128 tokens, 64 output tokens, 2 stages
length      prompts of 128 to 32,768 tokens, 16 output tokens, 2 stages. The prompts have 16,384 tokens together, unless
            a single one has more
lines       10 to 100,000 short rows for examples/tiny-adder, 2 stages

The first three use the checkpoint of measure_300m.py, and make it if it does not exist. Each point is a `generate` with
the policy `balanced` and one compute thread per stage. Points take turns in every round. Prints each run, and writes
medians and extremes after every round. --picture also draws them, in headless Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import plotly.graph_objects as go
from awake import awake
from measure_300m import make_checkpoint
from photograph import photograph
from plotly.subplots import make_subplots
from record import EXAMPLES, Record, spread

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.bench.footprint import Footprint
from sarathi_pp.bench.machine import stolen
from sarathi_pp.sim.workload import parse_workload

STAGES, EMULATED = (1, 2), (1, 2, 4, 8)
IN_FLIGHT = tuple(2**power for power in range(10))
LENGTHS = (128, 512, 2048, 8192, 32768)
LINES = (10, 100, 1000, 10_000, 100_000)
PROMPT_TOKENS = 16384
REPORTED = ("total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady", "wall_s")
FIGURES = (*REPORTED, "peak_bytes")
# Some runs lack a figure: with a single request, two stages never compute at the same time.
Figures = Mapping[str, float | None]
Found = dict[str, dict[int, list[Figures]]]


@dataclass(frozen=True)
class Point:
    """One point of the figures.

    Attributes:
        axis: name of the axis.
        at: position on the axis.
        workload: None for rows that the adder answers.
        options: options of `generate`.
    """

    axis: str
    at: int
    workload: str | None
    options: tuple[str, ...]


def points(work_dir: Path) -> Iterator[Point]:
    model, profile = ("--model", str(work_dir / "model")), ("--emulate", str(work_dir / "growth-profile.json"))
    work = "uniform:n=32,min=256,max=1024,pd=8,seed=0"
    for axis, what, counts in (("stages", model, STAGES), ("stages, emulated", profile, EMULATED)):
        for count in counts:
            yield Point(axis, count, work, (*what, "--stages", str(count)))
    for count in IN_FLIGHT:
        options = (*model, "--stages", "2", "--max-num-seqs", str(count))
        yield Point("in flight", count, f"uniform:n={count},min=64,max=128,output=64,seed=0", options)
    longer = ("--model", str(work_dir / "model-long"), "--stages", "2")
    for length in LENGTHS:
        count = max(1, PROMPT_TOKENS // length)
        yield Point("length", length, f"fixed:n={count},prompt={length},output=16,seed=0", longer)
    for count in LINES:
        yield Point("lines", count, None, ("--model", str(EXAMPLES / "tiny-adder"), "--stages", "2"))


def prepare(work_dir: Path) -> None:
    """Make the checkpoint, a copy that allows longer prompts, and the profile of the emulated stages."""
    model, longer, profile = work_dir / "model", work_dir / "model-long", work_dir / "growth-profile.json"
    if not (model / "config.json").exists():
        make_checkpoint(model)
    if not longer.exists():
        shutil.copytree(model, longer, copy_function=os.link)
        config = json.loads((model / "config.json").read_text())
        (longer / "config.json").unlink()  # a hard link: writing to it would change both models
        (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * max(LENGTHS)}))
    if not profile.exists():
        sarathi_pp("profile", "--model", str(model), "--stages", "2", "--output", str(profile), "--quiet")


def sarathi_pp(*words: str) -> tuple[str, int]:
    """Run a command. Return its output, and the most bytes that its processes hold at once, the report included."""
    command = [sys.executable, "-P", "-m", "sarathi_pp", *words]
    environment, footprint = {**os.environ, "OMP_NUM_THREADS": "1"}, Footprint()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        with footprint.watching(process.pid):
            printed = process.communicate()[0]
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return printed, footprint.peak_bytes


def run(point: Point, work_dir: Path) -> Figures:
    rows, answers = work_dir / "growth-rows.jsonl", work_dir / "growth-answers.jsonl"
    if point.workload is None:
        with rows.open("w") as file:
            for index in range(point.at):
                file.write(json.dumps({"prompt": f"{index % 1000}+{index % 7}=", "max_new_tokens": 5}) + "\n")
    else:
        write_prompts(rows, parse_workload(point.workload).requests())
    given = ("--input", str(rows), "--output", str(answers), "--overwrite", "--quiet", "--json")
    output, peak_bytes = sarathi_pp("generate", *point.options, *given)
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert report["failed"] == 0, report
    return {**{name: report[name] for name in REPORTED}, "peak_bytes": peak_bytes}


def summary(found: Found) -> dict[str, dict[str, Any]]:
    return {
        axis: {
            str(at): {name: spread_of([one[name] for one in of_rounds]) for name in FIGURES}
            for at, of_rounds in of_axis.items()
        }
        for axis, of_axis in found.items()
    }


def spread_of(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return median and extremes of the runs that have the figure, or None if no run has it."""
    there = [value for value in values if value is not None]
    return spread(there) if there else None


def printed(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def draw(grown: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """Draw tokens per second and the bubble of each axis next to each other."""
    titles = [f"{axis}{what}" for axis in grown for what in (": tokens/s", ": bubble, %")]
    figure = make_subplots(rows=len(grown), cols=2, subplot_titles=titles, vertical_spacing=0.3 / len(grown))
    for row, of_axis in enumerate(grown.values(), start=1):
        at = [int(name) for name in of_axis]
        for column, (name, factor) in enumerate((("total_tokens_per_s", 1.0), ("bubble_ratio", 100.0)), start=1):
            middle = [factor * point[name]["median"] for point in of_axis.values()]
            above = [factor * point[name]["max"] - y for point, y in zip(of_axis.values(), middle, strict=True)]
            below = [y - factor * point[name]["min"] for point, y in zip(of_axis.values(), middle, strict=True)]
            bars = {"type": "data", "array": above, "arrayminus": below, "symmetric": False}
            figure.add_trace(go.Scatter(x=at, y=middle, error_y=bars, mode="lines+markers"), row, column)
            figure.update_xaxes(type="log", tickvals=at, ticktext=[f"{value:,}" for value in at], row=row, col=column)
            figure.update_yaxes(rangemode="tozero", row=row, col=column)
    figure.update_layout(
        width=1100, height=260 * len(grown), showlegend=False, template="plotly_white", margin={"t": 40, "b": 40}
    )
    figure.update_traces(line_color="#1f5fa8")
    photograph(
        figure.to_html(),
        ".plotly-graph-div",
        picture,
        drawn=".main-svg",
        width=1120,
        height=260 * len(grown) + 20,
    )


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option("--axis", "axes", multiple=True, help="Only this axis. May be repeated.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write after every round.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file for the plots.")
def main(work_dir: Path, axes: Sequence[str], rounds: int, output: Path | None, picture: Path | None) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    prepare(work_dir)
    wanted = [point for point in points(work_dir) if not axes or point.axis in axes]
    found: Found = {point.axis: {} for point in wanted}
    for made in range(1, rounds + 1):
        with awake(), stolen() as lost:
            for point in wanted:
                figures = run(point, work_dir)
                found[point.axis].setdefault(point.at, []).append(figures)
                print(point.axis, point.at, " ".join(printed(figures[name]) for name in FIGURES), flush=True)
        record.write(output, {"rounds made": made, "stolen in the last": lost.share, **summary(found)})
    if picture is not None:
        draw(summary(found), picture)


if __name__ == "__main__":
    main()
