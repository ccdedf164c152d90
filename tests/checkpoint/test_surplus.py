"""Tensors without effect are ignored with a note. Any other tensor without a place is still an error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.checkpoint.files import SINGLE_FILE, open_checkpoint
from sarathi_pp.checkpoint.surplus import surplus_kind
from sarathi_pp.errors import InputError, UnsupportedModelError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.loader import load_stage
from tests.model.families import FAMILIES, NUM_LAYERS, write_checkpoint
from tests.model.test_stage_model import relative_error, run_schedule

CPU = torch.device("cpu")
LAYERS = "model.layers.0.self_attn"

SURPLUS: dict[str, torch.Tensor] = {
    f"{LAYERS}.rotary_emb.inv_freq": torch.ones(6),
    f"{LAYERS}.rotary_emb.cos_cached": torch.ones(1, 1, 512, 12),
    "model.rotary_emb.inv_freq": torch.ones(6),
    f"{LAYERS}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
    f"{LAYERS}.masked_bias": torch.tensor(-1e9),
    "model.position_ids": torch.arange(8),
    f"{LAYERS}.k_scale": torch.ones(1),
    "mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 48),
    "v_head.summary.weight": torch.zeros(1, 48),
    "score.weight": torch.zeros(1, 48),
    "statistics.counts": torch.zeros(3, dtype=torch.uint16),
    "num_batches_tracked": torch.tensor(3),
}
ERRORS: dict[str, torch.Tensor] = {
    f"{LAYERS}.q_proj.lora_A.weight": torch.zeros(2, 48),
    f"{LAYERS}.bias": torch.zeros(48),
    "model.layers.5.mlp.up_proj.weight": torch.zeros(2, 48),
    "lm_head.bias": torch.zeros(128),
    f"{LAYERS}.q_proj.weight_scale": torch.ones(1),
    "other.weight": torch.zeros(2),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_checkpoint("qwen3", directory)


def with_tensors(source: Path, directory: Path, more: dict[str, torch.Tensor]) -> None:
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(load_file(source / SINGLE_FILE) | more, directory / SINGLE_FILE)


def test_what_decides_nothing_is_left_aside(llama: tuple[Path, Any], tmp_path: Path) -> None:
    source, reference = llama
    with_tensors(source, tmp_path, SURPLUS)
    facts = check_model(tmp_path)
    assert len(facts.notes) == 1 and len(facts.notes[0]) < 700
    stages = [
        load_stage(tmp_path, part, NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 4))
        for part in ((0, 2), (2, 5))
    ]
    assert relative_error(run_schedule(stages, facts), reference) < 1e-5
    assert check_model(source).notes == ()


def test_layers_for_multi_token_prediction_are_left_aside(llama: tuple[Path, Any], tmp_path: Path) -> None:
    names = {f"model.layers.{NUM_LAYERS}.{name}.weight": torch.zeros(2, 48) for name in ("eh_proj", "embed_tokens")}
    with_tensors(llama[0], tmp_path, names)
    with pytest.raises(InputError, match=f"the model has no place for model.layers.{NUM_LAYERS}.e"):
        load_stage(tmp_path, (4, 5), NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 4))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    load_stage(tmp_path, (4, 5), NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 4))
    assert "layers for multi-token prediction (model.layers.5.e" in check_model(tmp_path).notes[0]


@pytest.mark.parametrize("said", [{}, {"num_nextn_predict_layers": None}, {"num_nextn_predict_layers": 0}])
def test_a_layer_that_config_json_does_not_count_is_an_error(
    said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers ignores the layer with index 61 of every DeepSeek model, whatever its config.json says."""
    ignored = [rf"model\.layers\.{NUM_LAYERS}.*", "other"]
    monkeypatch.setattr(transformers.DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", ignored)
    write_checkpoint("deepseek_v3", tmp_path / "source")
    names = (f"model.layers.{NUM_LAYERS}.eh_proj.weight", "other.weight")
    with_tensors(tmp_path / "source", tmp_path, {name: torch.zeros(2, 48) for name in names})
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(InputError, match=f"the model has no place for {names[0]};"):
        load_stage(tmp_path, (4, 5), NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 4))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_mtp_layers": 1}))
    load_stage(tmp_path, (4, 5), NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 4))


@pytest.mark.parametrize("name", SURPLUS)
def test_each_kind_is_named(name: str, llama: tuple[Path, Any], tmp_path: Path) -> None:
    with_tensors(llama[0], tmp_path, {name: SURPLUS[name]})
    assert name in check_model(tmp_path).notes[0]


@pytest.mark.parametrize("name", ERRORS)
def test_what_could_decide_something_is_an_error(name: str, llama: tuple[Path, Any], tmp_path: Path) -> None:
    with_tensors(llama[0], tmp_path, {name: ERRORS[name]})
    assert check_model(tmp_path).notes == ()
    with pytest.raises(InputError, match=f"no place for {name}"):
        load_stage(tmp_path, (0, 5), NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_a_family_computes_with_is_surplus(family: str, llama: tuple[Path, Any], tmp_path: Path) -> None:
    """The names are those of the library and those of files."""
    model = write_checkpoint(family, tmp_path)
    entry = next(iter(open_checkpoint(tmp_path).tensors.values()))
    stored = open_checkpoint(tmp_path).tensors
    assert not [key for key, stored_entry in stored.items() if surplus_kind(key, stored_entry) is not None]
    assert not [key for key, _ in model.named_parameters() if surplus_kind(key, entry) is not None]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "U8", "F4", "X99"])
def test_a_weight_of_another_type_is_named_with_it(dtype: str, llama: tuple[Path, Any], tmp_path: Path) -> None:
    """The type may be known or unknown."""
    num_bytes = {"I32": 8}.get(dtype, 2)
    name = f"{LAYERS}.q_proj.weight"
    described = {
        "model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        name: {"dtype": dtype, "shape": [2], "data_offsets": [8, 8 + num_bytes]},
    }
    header = json.dumps(described).encode()
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 + num_bytes))
    (tmp_path / "config.json").write_bytes((llama[0] / "config.json").read_bytes())
    with pytest.raises(UnsupportedModelError, match=f"{name} is stored as {dtype}"):
        check_model(tmp_path)
