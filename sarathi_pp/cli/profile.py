"""`sarathi-pp profile`: measure the cost of a model's stages on this machine, and write it to a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.cli.option_group import SectionedCommand, SectionedOption
from sarathi_pp.cli.options import MEMORY, MODEL, PARALLELISM, RECOVERY, RUN, SCHEDULE, run_config
from sarathi_pp.cli.show import ConsoleDisplay
from sarathi_pp.cli.values import OutputFile
from sarathi_pp.config import RunConfig
from sarathi_pp.report import formats

if TYPE_CHECKING:
    from sarathi_pp.distributed.environment import RankEnvironment


@click.command(
    cls=SectionedCommand,
    params=[
        SectionedOption(
            ["--output", "-o"],
            section=RUN.title,
            type=OutputFile("--json prints the profile"),
            required=True,
            help="The profile.json to write.",
        ),
        *RUN.options("--overwrite"),
        RUN.option("--run-dir", show_default="deleted at the end"),
        RUN.option("--seed", help="Seed of the synthetic prompts and of their order."),
        *RUN.options("--json", "--quiet"),
        MODEL.option("--model", required=True),
        *MODEL.options("--dtype", "--device", "--attention", "--max-model-len"),
        *MEMORY.options(),
        *PARALLELISM.options("--stages", "--tensor-parallel-size", "--layer-split"),
        *SCHEDULE.options("--max-num-seqs"),
        *RECOVERY.options("--peer-timeout"),
    ],
)
def profile(output: Path, overwrite: bool, as_json: bool, quiet: bool, **options: Any) -> int:
    """Measure what the stages of a model cost, on synthetic prompts.

    Runs microbatches of many sizes through the real pipeline for about a minute and fits the cost model to their times.
    Prints its error on microbatches that were kept from the fit. `plan` and `generate --profile` use the result.
    """
    from sarathi_pp.distributed.environment import find_environment, let_threads_sleep
    from sarathi_pp.process.signals import stoppable

    let_threads_sleep()
    with stoppable("the calibration"):
        return _profile(find_environment(), output, overwrite=overwrite, as_json=as_json, quiet=quiet, options=options)


def _profile(
    env: RankEnvironment | None, output: Path, *, overwrite: bool, as_json: bool, quiet: bool, options: dict[str, Any]
) -> int:
    from sarathi_pp.distributed.environment import mesh_of

    config = run_config(options, env.world_size if env else None)
    console = Console(stderr=True, quiet=env is not None and env.local_rank != 0)
    with _ProfileDisplay(console, quiet=quiet, as_json=as_json, kept=str(output)) as display:
        if env is None or env.rank == 0:
            with display.activity.phase("reading the model's configuration"):
                _preflight(config, output, overwrite)
        if env is None and config.num_ranks > 1:
            from sarathi_pp.distributed.launcher import launch

            display.leave_to_workers(config.num_ranks)
            return launch(mesh_of(config), sys.argv[1:], display)
        with display.activity.phase("loading libraries"):
            from sarathi_pp.tuning.calibrate import run_profile

        return run_profile(config, env, output, display, overwrite=overwrite)


def _preflight(config: RunConfig, output: Path, overwrite: bool) -> None:
    """Check everything that can be checked before a model is loaded."""
    from sarathi_pp.checkpoint.facts.support import check_model, check_shards
    from sarathi_pp.checkpoint.fetch import find_model
    from sarathi_pp.core.partition import partition
    from sarathi_pp.outputs.profile_file import check_profile_output
    from sarathi_pp.outputs.run_directory import RunDirectory
    from sarathi_pp.run.preflight import check_machine

    check_profile_output(output, overwrite=overwrite)
    if config.run_dir is not None:
        RunDirectory.check(config.run_dir, overwrite=overwrite)
    check_machine(config)
    model_dir = find_model(config.model)
    partition(check_model(model_dir).num_layers, config.stages, config.layer_split)
    check_shards(model_dir, config.tensor_parallel_size)


class _ProfileDisplay(ConsoleDisplay):
    """The display of a calibration. At the end it shows the profile instead of a report.

    It counts microbatches: many requests of a calibration end only with its last microbatches.
    """

    counts_microbatches = True

    def render(self, report: dict[str, Any]) -> RenderableType:
        return render_profile(report)


def render_profile(found: Mapping[str, Any]) -> RenderableType:
    """Return the tables of a profile and its measurement, which fit 80 columns.

    Args:
        found: the dictionary that `_write_profile` of tuning/calibrate.py returns.
    """
    parts: list[RenderableType] = [_headline(found), "", _stages(found), "", _throughput(found)]
    if found["disturbed"] is not None and found["disturbed"] > 0.1:
        note = f"note: cores were shared in {found['disturbed']:.0%} of the spans; their CPU time was taken instead"
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _headline(found: Mapping[str, Any]) -> Text:
    link = found["link"]
    lines = [
        f"{found['microbatches']} microbatches measured on {found['device']} in {found['dtype']}; error "
        f"{formats.share(found['error'])} on the {found['held_out']} that were not fitted",
        f"tile {found['tile']}, ridge {found['ridge']}, saturated at {found['saturation_tokens']} tokens, jitter "
        f"{formats.share(found['jitter_cv'])}, {found['pages']:,} KV pages",
        f"the stages' speed drifts by {formats.share(found['drift']['cv'])} over {found['drift']['seconds']:g} s",
    ]
    if len(found["stages"]) > 1:
        lines.append(f"link: {1e3 * link['latency_s']:.3f} ms and {link['bytes_per_s'] / 1e9:.2f} GB/s")
    return Text("\n").join([*map(Text, lines), Text(f"written to {found['output']}", style="bold")])


def _stages(found: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ("a0\nms", f"a1\nus/{_tile(found)}", "a2\nns/pair", "a3\nus/key", "a4\nus/dec", "head\nus/row", "error")
    for heading in ("stage", "layers", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (stage, error) in enumerate(zip(found["stages"], found["stage_errors"], strict=True)):
        first, end = stage["layers"]
        scaled = zip(("a0", "a1", "a2", "a3", "a4", "head_s"), (1e3, 1e6, 1e9, 1e6, 1e6, 1e6), strict=True)
        cells = (f"{stage[name] * scale:.4g}" for name, scale in scaled)
        table.add_row(str(index), f"{first}-{end - 1}", *cells, formats.share(error))
    return table


def _tile(found: Mapping[str, Any]) -> str:
    return "token" if found["tile"] == 1 else "tile"


def _throughput(found: Mapping[str, Any]) -> Table:
    """Return the table of prompt tokens per second by size of the microbatch, for sizes that are powers of two."""
    shown = [(size, rate) for size, rate in found["throughput"] if size & (size - 1) == 0]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens", style="dim", no_wrap=True)
    for size, _ in shown:
        table.add_column(str(size), justify="right", no_wrap=True)
    table.add_row("tokens/s", *(f"{rate:.0f}" if rate < 100_000 else f"{rate / 1000:.0f}k" for _, rate in shown))
    return table
