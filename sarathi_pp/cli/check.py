"""`sarathi-pp check`: compare a model's stages with transformers on this machine, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.cli.option_group import Option, OptionGroup, SectionedCommand
from sarathi_pp.cli.options import MODEL, PARALLELISM, RUN
from sarathi_pp.errors import EXIT_OK
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.status import StatusLine

if TYPE_CHECKING:
    from sarathi_pp.stages.check import ModelCheck, StageCheck

# As of `bench gpu`: a check failed.
_EXIT_DIFFERENT = 1

_BOUNDARIES = {
    "sliding_window": "the sliding window of {} tokens",
    "short_factors": "the {} tokens for which rotary embeddings use the short factors",
}

_PROMPTS = OptionGroup(
    "Prompts",
    Option(
        "--prompts",
        type=click.Path(path_type=Path),
        metavar="FILE",
        show_default="random tokens",
        help="Text with a prompt on each line.",
    ),
)


@click.command(
    cls=SectionedCommand,
    params=[
        MODEL.option("--model", required=True),
        PARALLELISM.option("--stages", default=1, show_default=True),
        *_PROMPTS.options(),
        *RUN.options("--json"),
    ],
)
def check(model: str, stages: int, prompts: Path | None, as_json: bool) -> int:
    """Compare a model's stages with transformers on this machine.

    Both compute the same prompts in float32 on CPU. transformers computes them in one piece with its own model. The
    stages compute chunks of several prompts at a time, then single tokens, as in a run. If the model does not fit into
    memory, the layers of one stage are compared at a time: give more --stages. The first layer that differs by more
    than rounding is named. Both use the weights as this program reads them, so quantised weights are dequantised alike.
    A sliding window is compared only if a prompt is longer. One of the random prompts is, if memory and time permit.
    The exit code is 0 if nothing differs, and 1 otherwise.
    """
    from sarathi_pp.process.signals import stoppable

    with stoppable("the check"):
        return _check(model, stages, prompts, as_json=as_json)


def _check(model: str, stages: int, prompts: Path | None, *, as_json: bool) -> int:
    activity = Activity()
    with StatusLine(Console(stderr=True), activity), activity.phase("loading libraries"):
        from sarathi_pp.checkpoint.fetch import find_model
        from sarathi_pp.stages.check import check_stages
        from sarathi_pp.stages.check_prompts import random_prompts, read_prompts

        directory = find_model(model)
        tokens = random_prompts(directory, stages) if prompts is None else read_prompts(directory, prompts)
        found = check_stages(model, directory, stages, tokens, activity)
    Console(stderr=True).print(_render(found))
    if as_json:
        click.echo(json.dumps(found.to_json(), allow_nan=False))
    return EXIT_OK if found.exact else _EXIT_DIFFERENT


def _where(stage: StageCheck) -> str:
    """Return the first layer that differs, as text."""
    layers = [layer for layer in (stage.first_layer, stage.tie_layer) if layer is not None]
    return "-" if stage.exact else str(min(layers)) if layers else "none alone"


def _render(found: ModelCheck) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("stage", "layers", "largest error", "first layer that differs"):
        table.add_column(heading, justify="right" if heading != "layers" else "left", no_wrap=True)
    for index, stage in enumerate(found.stages):
        first, end = stage.layers
        where = _where(stage)
        style = "" if stage.exact else "bold red"
        table.add_row(str(index), f"{first}-{end - 1}", f"{stage.error:.1e}", where, style=style)
    how = "the whole model at once" if found.whole else "the layers of one stage at a time"
    tokens = f"{found.num_equal:,} of {found.num_tokens:,} next tokens equal"
    close = f", {found.num_close:,} close calls" if found.num_close else ""
    verdict = (
        Text("OK: the stages compute what transformers computes", style="bold green")
        if found.exact
        else Text("the stages differ from transformers", style="bold red")
    )
    lines = [f"transformers computed {how}, in float32; attention {found.attention}; {tokens}{close}"]
    if found.num_ties:
        lines.append(f"{found.num_ties:,} rows chose between experts of equal score, and took those of transformers")
    for boundary in found.boundaries:
        what = _BOUNDARIES[boundary.kind].format(f"{boundary.num_tokens:,}")
        lines.append(
            f"a prompt was longer than {what}"
            if boundary.reached
            else f"no prompt was longer than {what}, so this was not compared; give longer prompts with --prompts"
        )
    for stage in found.stages:
        if stage.tie_layer is not None:
            lines.append(f"layer {stage.tie_layer}: {stage.layer_ties:,} of them, which is more than rounding explains")
    return Group(table, *lines, verdict)
