"""Draw the README's picture: the timelines of the same work under two policies, from the HTML page.

    python examples/benchmarks/draw_timelines.py --work-dir /tmp/m300 --output docs/benchmarks/results/orca-balanced.png

Runs `orca` and `balanced` on the workload of measure_300m.py at P:D 8, with two stages and one compute thread each.
Makes the page of `sarathi-pp compare --html` and takes a picture of its timeline (photograph.py). A JSON file next to
the picture has the figures of both runs.
"""

from __future__ import annotations

from pathlib import Path

import click
from awake import awake
from measure_300m import FIGURES, Work, make_checkpoint, start
from photograph import photograph
from record import Record

from sarathi_pp.bench.contest import write_prompts
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.report.comparison import compare
from sarathi_pp.report.page.comparison_page import render_comparison_page
from sarathi_pp.report.page.part import PagePart
from sarathi_pp.report.run_reader import read_run
from sarathi_pp.sim.workload import parse_workload

POLICIES = ("orca", "balanced")
RATIO = 8
STAGES = 2
WIDTH, HEIGHT = 1100, 900
# Parts of the timeline that explain its use.
CONTROLS = "#timeline button, #timeline .hint"


def run_for_page(work: Work, policy: str) -> PagePart:
    prompts, answers = work.prompts(RATIO), work.dir / f"picture-{policy}.jsonl"
    options = (
        "--policy",
        policy,
        "--chunk-size",
        str(parse_policy(policy).kind.default_chunk_size),
        "--input",
        str(prompts),
    )
    process = start(work, "generate", STAGES, answers.with_suffix(".printed"), *options, "--output", str(answers))
    if process.wait():
        raise click.ClickException(f"the run of {policy} ended with code {process.returncode}")
    found = read_run(answers.with_name(f"{answers.name}.run"))
    return PagePart(policy, found.replicas[0].timeline, found.replicas[0].bubbles, found.report)


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="PNG file to write. Its figures go into a .json file.",
)
@click.option("--dtype", default="bfloat16", help="float32 on a CPU without bfloat16 products.")
def main(work_dir: Path, output: Path, dtype: str) -> None:
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    work = Work(work_dir, dtype)
    write_prompts(work.prompts(RATIO), parse_workload(work.workload(RATIO)).requests())
    with awake():
        runs = [run_for_page(work, policy) for policy in POLICIES]
    page = render_comparison_page(compare([(run.title, dict(run.report)) for run in runs]), runs)
    photograph(page, "#timeline", output, drawn="html[data-drawn]", width=WIDTH, height=HEIGHT, without=CONTROLS)
    record.write(
        output.with_suffix(".json"),
        {policy: {name: one.report[name] for name in FIGURES} for policy, one in zip(POLICIES, runs, strict=True)},
    )


if __name__ == "__main__":
    main()
