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

from sarathi_pp.model.checkpoint.config_file import ConfigFile
from sarathi_pp.model.checkpoint.files import open_checkpoint
from sarathi_pp.model.checkpoint.quantised.scheme import Scheme, WeightRule, read_scheme
from sarathi_pp.model.checkpoint.wrapper import text_checkpoint
from tests.model.checkpoint.quantised import FORMS, Form, publish
from tests.model.checkpoint.test_wrapper import NUM_LAYERS, load
from tests.model.checkpoint.wrappers import KINDS, make

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
