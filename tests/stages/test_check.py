"""`check` passes where stages are right, and names the layer with a planted fault."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.cli.main import main
from sarathi_pp.errors import CapacityError, InputError, PartitionError
from sarathi_pp.model import loader
from sarathi_pp.model.inputs import Span, StageInputs, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.process.activity import Activity
from sarathi_pp.stages import check, check_memory
from sarathi_pp.stages.check import ModelCheck, check_stages
from sarathi_pp.stages.check_memory import CheckMemory
from sarathi_pp.stages.check_prompts import random_prompts
from tests.model.families import FAMILIES, build_model, write_checkpoint

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
    return check_stages("m", directory, stages, random_prompts(directory, stages), Activity())


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if n % 9 == 0 else pytest.mark.full) for n, f in enumerate(FAMILIES)]
)
def test_every_family_passes(family: str, saved: Saved) -> None:
    found = checked(saved(family))
    assert found.exact and found.whole, found
    assert found.num_tokens == sum(map(len, random_prompts(saved(family), 2)))
    assert [stage.layers for stage in found.stages] == [(0, 3), (3, 5)]
    assert 0 < max(stage.error for stage in found.stages) < 3e-5
    assert found.num_ties == 0 and all(boundary.reached for boundary in found.boundaries)


@pytest.fixture(params=[0.7, 0.0], ids=["whole", "stage by stage"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Compare with transformers' whole model, or with the layers of one stage at a time."""
    share = float(request.param)
    monkeypatch.setattr(check_memory, "_ROOM", share)
    return share


@pytest.mark.parametrize("layer", [2, 3])
def test_a_doubled_weight_is_found_in_its_layer(
    layer: int, saved: Saved, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, load = saved("qwen3"), check.load_stage

    def load_wrong(directory: Path, layers: tuple[int, int], *how: Any) -> Any:
        stage = load(directory, layers, *how)
        if layers[0] <= layer < layers[1]:
            stage.module.model.layers[layer].post_attention_layernorm.weight.mul_(2)
        return stage

    assert checked(directory).exact
    monkeypatch.setattr(check, "load_stage", load_wrong)
    found = checked(directory)
    wrong, right = sorted(found.stages, key=lambda stage: stage.exact)
    assert found.whole is (room > 0)
    assert not found.exact and right.exact and not wrong.exact
    assert wrong.first_layer == layer and wrong.layers[0] <= layer < wrong.layers[1]
    assert (wrong.layer_error or 0) > 0.01


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

    def compute_wrong(self: Any, *how: Any) -> Any:
        for index, first, rows in compute(self, *how):
            yield index, first, torch.where(torch.tensor(index == prompt and first == 0), torch.nan, rows)

    monkeypatch.setattr(check._Stage, "compute", compute_wrong)
    found = checked(saved("qwen3"))
    assert not any(stage.exact for stage in found.stages)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [stage["error"] for stage in document["stages"]] == [None, None] and not document["exact"]


def test_memory_that_runs_out_is_an_error_with_a_remedy(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*how: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 8 bytes")

    monkeypatch.setattr(check, "load_stage", run_out)
    with pytest.raises(CapacityError, match=r"layers 0 to 4 were compared: (.|\n)*try  more --stages, or shorter"):
        checked(saved("qwen3"))


def test_a_huge_value_in_one_row_hides_no_difference_in_others() -> None:
    """The first token of many models has values that are thousands of times larger than the others."""
    before, theirs = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(6))
    before[0, 0] = theirs[0, 0] = 1e4
    assert check._error(theirs * (1 + 1e-7), theirs, before) < check.MOST_ERROR
    ours = theirs.clone()
    ours[3] *= 1.001
    assert check._error(ours, theirs, before) > 3 * check.MOST_ERROR


def test_a_prompt_is_computed_in_chunks_and_decodes() -> None:
    spans = [span for microbatch in check._microbatches([3, 60, 120]) for span in microbatch]
    for index, length in enumerate((3, 60, 120)):
        ours = [(first, end) for which, first, end in spans if which == index]
        assert [first for first, _ in ours] == [0, *(end for _, end in ours[:-1])] and ours[-1][1] == length
        assert [end - first for first, end in ours[-4:]] == [1] * min(4, length)
    assert max(map(len, check._microbatches([3, 60, 120]))) == 3


def test_each_prompt_has_a_state_slot(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, int]] = set()

    def record(spans: Sequence[Span], *others: Any) -> StageInputs:
        seen.update((span.pages[0], span.slot) for span in spans)
        return build_inputs(spans, *others)

    def make(*sizes: Any, num_slots: int) -> KVShard:
        assert num_slots == 4
        return KVShard(*sizes, num_slots=num_slots)

    monkeypatch.setattr(check, "build_inputs", record)
    monkeypatch.setattr(check, "KVShard", make)
    assert checked(saved("llama")).exact
    assert sorted(slot for _, slot in seen) == [0, 1, 2, 3]


def test_groups_give_the_same_result(saved: Saved, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = checked(saved("gemma2"))
    monkeypatch.setattr(check_memory, "_GROUP_TOKENS", 80)
    groups = check.split_groups(list(map(len, random_prompts(saved("gemma2"), 2))))
    assert groups == [range(3), range(3, 4)]
    found = checked(saved("gemma2"))
    assert found.exact and (found.num_tokens, found.num_equal) == (at_once.num_tokens, at_once.num_equal)
    assert [stage.layers for stage in found.stages] == [stage.layers for stage in at_once.stages]


def test_a_fault_in_the_last_group_is_found(saved: Saved, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the prompt of 200 tokens has rows at positions above 100."""
    directory, attend = saved("qwen3"), check.build_inputs
    monkeypatch.setattr(check_memory, "_GROUP_TOKENS", 80)

    def build_wrong(spans: Any, *how: Any) -> Any:
        inputs = attend(spans, *how)
        inputs.position_ids[inputs.position_ids > 100] += 1
        return inputs

    monkeypatch.setattr(check, "build_inputs", build_wrong)
    found = checked(directory)
    assert [stage.first_layer for stage in found.stages] == [0, 3]


def test_memory_does_not_grow_with_the_number_of_prompts(saved: Saved) -> None:
    """500 prompts of 2,000 tokens: their logits alone would take 559 GiB."""
    facts = replace(check_model(saved("qwen3")), vocab_size=150_000, max_position_embeddings=4096)
    memory = CheckMemory(facts, [(0, 3), (3, 5)], 0, [0, 0], 2**33)
    assert memory.parts([2000]) == memory.parts([2000] * 500) == [(0, 5)]
    many = [64, 300, 700, 2000, 24, 1000]
    assert check.split_groups(many) == [range(2), range(2, 3), range(3, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("weights", "lengths", "remedy"),
    [
        (2**33, [200], "more --stages"),
        (2**20, [20_000], "shorter prompts"),
        (2**20, [100] * 2_000_000, "fewer prompts"),
    ],
)
def test_what_does_not_fit_is_refused(weights: int, lengths: list[int], remedy: str, saved: Saved) -> None:
    memory = CheckMemory(check_model(saved("qwen3")), [(0, 3), (3, 5)], 2**40, [2**20, weights], 2**33)
    with pytest.raises(CapacityError, match=f"and 8 GiB are available(.|\n)*try  {remedy}$") as refused:
        memory.parts(lengths)
    assert f"{max(lengths):,} tokens" in str(refused.value) and f"all {sum(lengths):,} tokens" in str(refused.value)
    memory.parts([200, 64]) if weights == 2**20 else None


def test_weights_that_give_nan_are_named(tmp_path: Path) -> None:
    model = build_model("qwen3")
    model.model.layers[2].mlp.down_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="transformers itself computes NaN or infinity before layer 3"):
        checked(tmp_path)


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_the_command_with_its_code(
    number: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "load_stage", lambda *how: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(ADDER), "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == code and printed.out == "" and "Traceback" not in printed.err


def test_ties_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [check.StageCheck((0, 3), 1e-6, num_ties=2), check.StageCheck((3, 5), 1e-6, None, None, 9, 4, 8)]
    found = ModelCheck("m", "mixtral", None, True, "numba", [], stages, 10, 10, 0)
    monkeypatch.setattr(check, "check_stages", lambda *how: found)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(ADDER)])
    shown = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 1 and not stages[1].exact
    assert "11 rows chose between experts of equal score, and took those of transformers" in shown
    assert "layer 4: 8 of them, which is more than rounding explains" in shown


def test_more_stages_than_layers_are_refused(saved: Saved) -> None:
    with pytest.raises(PartitionError):
        checked(saved("qwen3"), 9)
