"""Quantised checkpoints of multimodal models: modules that config.json names, and experts stored transposed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file

from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.checkpoint.facts.wrapper import text_checkpoint
from sarathi_pp.checkpoint.files import open_checkpoint
from sarathi_pp.checkpoint.quantised import tensor
from sarathi_pp.checkpoint.quantised.scheme import Scheme, WeightRule, read_scheme
from sarathi_pp.errors import InputError
from tests.checkpoint.quantised import FORMS, Form, Published, Quantised, publish
from tests.checkpoint.test_quantised import change
from tests.checkpoint.test_wrapper import NUM_LAYERS, load
from tests.checkpoint.wrappers import KINDS, make
from tests.model.shards import load_gang

pytestmark = pytest.mark.usefixtures("plain_linears")  # parameters are compared

# Targets of the attention, as configurations of multimodal models name it.
ATTENTION = [
    "re:.*language_model.*self_attn.*",
    "re:language_model.model.layers.*self_attn",
    "re:model.language_model.layers.*self_attn",
]


def expect_equal(ours: Any, theirs: Any) -> None:
    expected = dict(theirs.module.named_parameters())
    held = dict(ours.module.named_parameters())
    assert set(held) == set(expected) and len(held) > 5
    for name, parameter in held.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("target", ATTENTION)
def test_targets_name_modules_as_they_are_published(target: str, tmp_path: Path) -> None:
    """Attention in 8 bits, the others in 4. The last target has the names that transformers gives the modules."""
    make("gemma3", tmp_path / "source", old_names=True)
    four, eight = FORMS["packed int4 groups"], FORMS["packed int8 channels"]
    groups = {
        "group_0": four.settings["config_groups"]["group_0"],
        "group_1": eight.settings["config_groups"]["group_0"] | {"targets": [target]},
    }
    ignore = ["re:vision_tower.*", "re:multi_modal_projector.*", "language_model.lm_head"]
    settings = four.settings | {"config_groups": groups, "ignore": ignore}
    mixed = Form(settings, four.quantise, lambda name, weight: "language_model" in name and ".mlp." in name)
    publish(mixed, tmp_path / "source", tmp_path / "half", tmp_path / "half_reference")

    def of(name: str, weight: torch.Tensor) -> bool:
        return "language_model" in name and "_proj.weight" in name and ".self_attn." in name

    both = replace(mixed, quantise=eight.quantise, of=of)
    publish(both, tmp_path / "half", tmp_path / "quantised", tmp_path / "_")
    publish(both, tmp_path / "half_reference", tmp_path / "__", tmp_path / "reference")
    names = set(load_file(tmp_path / "quantised" / "model.safetensors"))
    assert "language_model.model.layers.0.self_attn.q_proj.weight_packed" in names
    layers = (0, NUM_LAYERS)
    expect_equal(load(tmp_path / "quantised", layers), load(tmp_path / "reference", layers))


@pytest.mark.parametrize("kind", KINDS)
def test_aliases_are_the_names_in_the_file_and_in_transformers(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path, old_names=True)
    config = ConfigFile.read(tmp_path)
    stored = open_checkpoint(tmp_path)
    assert config.wrapper is not None
    text, _ = text_checkpoint(stored, config.values, config.wrapper)
    stem = KINDS[kind][0]
    with torch.device("meta"):
        known = transformers.AutoConfig.from_pretrained(tmp_path)
        model = getattr(transformers, f"{stem}ForConditionalGeneration")(known)
    modules = dict(model.named_modules())
    assert len(text.aliases) == len(text.tensors) > 10
    for published, current in text.aliases.values():
        assert published in stored.tensors
        assert current.rpartition(".")[0] in modules or ".experts." in current  # transformers merges experts


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "lm_head"])
def test_the_rule_is_the_one_that_compressed_tensors_takes(name: str) -> None:
    """A name, then regular expressions in alphabetical order, then the class."""
    targets = ["Linear", "re:.*up_proj", "re:.*mlp.*", "re:.*q_proj", "lm_head", "re:lm_head", "re:.*layers"]
    scheme = read_scheme_of({target: bits for target, bits in zip(targets, (4, 8, 4, 8, 8, 4, 4), strict=True)})
    (expected, *_) = match_targets(name, torch.nn.Linear(1, 1), targets)
    assert scheme.rule(name) is scheme.rules[expected]
    assert scheme.rule("model.embed") is scheme.rules["Linear"]


def read_scheme_of(bits: dict[str, int]) -> Scheme:
    """Return the scheme of a configuration with one group per target, of this number of bits."""
    groups = {str(n): {"targets": [target], "weights": {"num_bits": bits[target]}} for n, target in enumerate(bits)}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    scheme = read_scheme(ConfigFile(Path(), {"quantization_config": settings}))
    assert scheme is not None and all(isinstance(rule, WeightRule) for rule in scheme.rules.values())
    return scheme


@pytest.fixture(scope="module")
def transposed(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Return FP8 experts that are stored as (experts, inputs, outputs), with scales alike. No test may change them."""
    directory = tmp_path_factory.mktemp("transposed")
    make("qwen3_vl_moe", directory / "source", old_names=True)
    form = FORMS["fp8 blocks"]

    def quantise(experts: torch.Tensor) -> Quantised:
        each = [form.quantise(matrix) for matrix in experts]
        codes = torch.stack([one.parts[".weight"].float() for one in each]).to(torch.float8_e4m3fn)
        scales = torch.stack([one.parts[".weight_scale_inv"] for one in each])
        return Quantised({"": codes, "_scale_inv": scales}, torch.stack([one.floats for one in each]))

    experts = replace(form, quantise=quantise, of=lambda name, weight: ".mlp.experts." in name)
    publish(experts, directory / "source", directory / "quantised", directory / "reference")
    return Published(directory / "quantised", directory / "reference")


def test_transposed_fp8_experts_are_those_of_the_dequantised_checkpoint(transposed: Published) -> None:
    """Whole, and in two shards."""
    stored = load_file(transposed.quantised / "model.safetensors")
    key = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert stored[key].shape == (4, 64, 48) and stored[f"{key}_scale_inv"].shape == (4, 2, 2)
    layers = (0, NUM_LAYERS)
    expect_equal(load(transposed.quantised, layers), load(transposed.reference, layers))
    ours, theirs = (load_gang(each, check_model(each), layers, 2, 16, 9) for each in vars(transposed).values())
    for one, other in zip(ours.stages, theirs.stages, strict=True):
        expect_equal(one, other)


def test_blocks_of_transposed_experts_may_have_any_size(transposed: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(transposed.reference, (0, NUM_LAYERS))
    monkeypatch.setattr(tensor, "_BLOCK_VALUES", 100)
    expect_equal(load(transposed.quantised, (0, NUM_LAYERS)), expected)


@pytest.mark.parametrize("shape", [(4, 1, 48), (4, 3, 2)], ids=["per output", "of other blocks"])
def test_scales_of_transposed_experts(shape: tuple[int, ...], transposed: Published, tmp_path: Path) -> None:
    """One per output, or refused."""
    key = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    directory = change(transposed.quantised, tmp_path, {f"{key}_scale_inv": scales})
    if shape == (4, 3, 2):
        with pytest.raises(InputError, match=r"\[4, 3, 2\]; expected \[4, 2, 2\]"):
            check_model(directory)
        return
    codes = load_file(directory / "model.safetensors")[key]
    held = load(directory, (0, 1)).module.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(held, (codes.float() * scales).mT)
