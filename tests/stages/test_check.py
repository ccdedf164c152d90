"""`check` passes where stages are right, and names the layer with a planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sarathi_pp.cli.main import main
from sarathi_pp.errors import PartitionError
from sarathi_pp.model import loader
from sarathi_pp.process.activity import Activity
from sarathi_pp.stages import check
from sarathi_pp.stages.check import ModelCheck, check_stages
from sarathi_pp.stages.check_prompts import random_prompts
from tests.model.families import FAMILIES, write_checkpoint

ADDER = Path("examples/tiny-adder").resolve()
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    written: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in written:
            written[family] = tmp_path_factory.mktemp(family)
            write_checkpoint(family, written[family])
        return written[family]

    return save


def checked(directory: Path, stages: int = 2) -> ModelCheck:
    return check_stages("m", directory, stages, random_prompts(directory), Activity())


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if n % 5 == 0 else pytest.mark.full) for n, f in enumerate(FAMILIES)]
)
def test_every_family_passes(family: str, saved: Saved) -> None:
    found = checked(saved(family))
    assert found.exact and found.whole, found
    assert found.num_tokens == sum(map(len, random_prompts(saved(family))))
    assert [stage.layers for stage in found.stages] == [(0, 3), (3, 5)]
    assert 0 < max(stage.error for stage in found.stages) < 3e-5


@pytest.fixture(params=[0.7, 0.0], ids=["whole", "stage by stage"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Compare with transformers' whole model, or with the layers of one stage at a time."""
    share = float(request.param)
    monkeypatch.setattr(check, "_ROOM", share)
    return share


def test_a_doubled_weight_is_found_in_its_layer(saved: Saved, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, load = saved("qwen3"), check.load_stage

    def load_wrong(directory: Path, layers: tuple[int, int], *how: Any) -> Any:
        stage = load(directory, layers, *how)
        if layers[0] <= 3 < layers[1]:
            stage.module.model.layers[3].post_attention_layernorm.weight.mul_(2)
        return stage

    assert checked(directory).exact
    monkeypatch.setattr(check, "load_stage", load_wrong)
    found = checked(directory)
    first, second = found.stages
    assert found.whole is (room > 0)
    assert not found.exact and first.exact and not second.exact
    assert (second.first_layer, second.layers) == (3, (3, 5)) and (second.layer_error or 0) > 0.01


def test_a_changed_rope_factor_is_found(saved: Saved, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, load, load_config = saved("llama"), check.load_stage, loader.load_config

    def other_factor(directory: Path) -> Any:
        family, config = load_config(directory)
        config.rope_parameters["factor"] *= 1.5
        return family, config

    def load_wrong(*how: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(loader, "load_config", other_factor)
            return load(*how)

    monkeypatch.setattr(check, "load_stage", load_wrong)
    found = checked(directory, 3)
    assert [stage.first_layer for stage in found.stages] == [0, 2, 4]


@pytest.mark.parametrize("prompt", [0, 2])
def test_nan_in_any_prompt_is_a_difference(prompt: int, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = check._Stage.compute

    def compute_wrong(self: Any, prompts: Any) -> Any:
        rows = compute(self, prompts)
        rows[prompt][0, 0] = torch.nan
        return rows

    monkeypatch.setattr(check._Stage, "compute", compute_wrong)
    assert not any(stage.exact for stage in checked(saved("qwen3")).stages)


def test_a_huge_value_in_one_row_hides_no_difference_in_others() -> None:
    """The first token of many models has values that are thousands of times larger than the others."""
    before, theirs = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(6))
    before[0, 0] = theirs[0, 0] = 1e4
    assert check._error([theirs * (1 + 1e-7)], [theirs], [before]) < check.MOST_ERROR
    ours = theirs.clone()
    ours[3] *= 1.001
    assert check._error([ours], [theirs], [before]) > 3 * check.MOST_ERROR


def test_a_prompt_is_computed_in_chunks_and_decodes() -> None:
    spans = [span for microbatch in check._microbatches([3, 60, 120]) for span in microbatch]
    for index, length in enumerate((3, 60, 120)):
        ours = [(first, end) for which, first, end in spans if which == index]
        assert [first for first, _ in ours] == [0, *(end for _, end in ours[:-1])] and ours[-1][1] == length
        assert [end - first for first, end in ours[-4:]] == [1] * min(4, length)
    assert max(map(len, check._microbatches([3, 60, 120]))) == 3


def test_the_command_ends_with_1_if_a_layer_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1 + 2 =\n12 + 34 =\n")
    arguments = ["check", "--model", str(ADDER), "--stages", "2", "--prompts", str(prompts), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert ended.value.code == 0 and document["exact"] and "OK: the stages compute" in printed.err
    assert document["num_equal"] == document["num_tokens"] > 8
    monkeypatch.setattr(check, "MOST_ERROR", 1e-12)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 1 and "the stages differ from transformers" in printed.err
    assert json.loads(printed.out)["stages"][0]["first_layer"] == 0


def test_more_stages_than_layers_are_refused(saved: Saved) -> None:
    with pytest.raises(PartitionError):
        checked(saved("qwen3"), 9)
