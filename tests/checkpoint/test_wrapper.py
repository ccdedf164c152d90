"""The text part of multimodal models gives what the whole model gives for text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint.facts import wrapper
from sarathi_pp.checkpoint.facts.support import check_model, describe_config
from sarathi_pp.checkpoint.facts.wrapper import TEXT_PARTS, WRAPPERS
from sarathi_pp.errors import InputError, UnsupportedModelError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from tests import thinning
from tests.checkpoint.wrappers import KINDS, make
from tests.engine.pipeline import run_pipeline
from tests.exact.answers import generate
from tests.model.shards import load_gang

NUM_LAYERS = 3
Saved = Callable[[str, bool], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a writer of checkpoints, each written once. No test may change them."""
    written: dict[tuple[str, bool], Path] = {}

    def save(kind: str, old_names: bool) -> Path:
        if (kind, old_names) not in written:
            directory = written[kind, old_names] = tmp_path_factory.mktemp(kind)
            make(kind, directory, old_names)
        return written[kind, old_names]

    return save


# Weights that modules with a state hold in another form.
OF_STATES = (".conv1d.weight", ".A_log", ".dt_bias")


def merged_projections(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of the linear layers that a gated delta-net merges."""
    made = {}
    for name in weights:
        if name.endswith(".in_proj_qkv.weight"):
            layer = name.removesuffix("in_proj_qkv.weight")
            for new, parts in ("in_proj", ("qkv", "z")), ("in_gates", ("b", "a")):
                made[f"{layer}{new}.weight"] = torch.cat([weights[f"{layer}in_proj_{part}.weight"] for part in parts])
    return made


def whole(directory: Path) -> Any:
    """Return transformers' own multimodal model."""
    stem = json.loads((directory / "config.json").read_text())["architectures"][0]
    return getattr(transformers, stem).from_pretrained(directory, dtype=torch.float32).eval()


def load(directory: Path, layers: tuple[int, int]) -> Any:
    cpu = torch.device("cpu")
    return load_stage(directory, layers, NUM_LAYERS, torch.float32, cpu, choose_backend("sdpa", cpu, 16))


def changed(source: Path, directory: Path, text: dict[str, Any], outer: dict[str, Any], tensors: Any = None) -> Path:
    """Copy a checkpoint with other keys in text_config and around it, and more tensors."""
    config = json.loads((source / "config.json").read_text())
    config["text_config"] = {k: v for k, v in (config["text_config"] | text).items() if v is not ...}
    config = {k: v for k, v in (config | outer).items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors") | (tensors or {}), directory / "model.safetensors")
    return directory


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("old_names", [False, True], ids=["new names", "published names"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_have_the_weights_of_the_whole_model(kind: str, old_names: bool, saved: Saved) -> None:
    directory = saved(kind, old_names)
    model = whole(directory)
    text = getattr(model.model, "language_model", None) or model.model.text_model
    expected = {f"model.{name}": parameter for name, parameter in text.named_parameters()}
    expected["lm_head.weight"] = model.lm_head.weight
    expected |= merged_projections(expected)
    for layers in ((0, 1), (1, 3)):
        stage = load(directory, layers)
        held = {name: parameter for name, parameter in stage.module.named_parameters()}
        assert len(held) > 5
        for name, parameter in held.items():
            if ".kv_b_proj." in name:  # latent attention holds it in another form
                continue
            assert torch.equal(parameter, expected[name]), name
        others = sum(one.nbytes for name, one in expected.items() if name.endswith(OF_STATES))
        assert stage.bytes_read <= sum(one.nbytes for one in (*held.values(), *stage.module.buffers())) + others
    facts = check_model(directory)
    assert "only the text part is loaded" in facts.notes[0]
    assert facts.tie_word_embeddings == (model.lm_head.weight is model.get_input_embeddings().weight)


def logits_of(directory: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of one stage for a prompt of up to 64 tokens."""
    facts, cpu = check_model(directory), torch.device("cpu")
    kv = KVShard((0, NUM_LAYERS), 4, 16, facts.caches, torch.float32, cpu, num_slots=1)
    inputs = build_inputs([Span(0, len(prompt), range(4), slot=0)], range(len(prompt)), 16, cpu)
    return load(directory, (0, NUM_LAYERS)).forward(torch.tensor(prompt), inputs, kv)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_whole_model(kind: str, saved: Saved) -> None:
    directory = saved(kind, kind in list(KINDS)[::2])
    model = whole(directory)
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(3, 100, (n,), generator=generator).tolist()) for n in (2, 9, 40)]
    expected = [generate(model, prompt, 8)[0] for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 3
    for stages in (2, 1) if thinning.full else (2,):
        outcome = run_pipeline(directory, prompts, stages=stages, chunk_size=7)
        assert [tuple(tokens) for tokens in outcome.tokens] == expected
    # A factor or a bound of all logits changes no greedy token.
    with torch.inference_mode():
        own = model(input_ids=torch.tensor(prompts[-1:]), use_cache=False).logits[0]
    assert (logits_of(directory, prompts[-1]) - own).abs().max() < 1e-5 * own.abs().max()


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("old_names", [False, True], ids=["as computed", "transposed"])
def test_merged_experts_are_cut_for_shards_in_either_form(old_names: bool, saved: Saved) -> None:
    directory = saved("qwen3_vl_moe", old_names)
    whole_stage = load(directory, (0, NUM_LAYERS))
    experts = whole_stage.module.model.layers[0].mlp.experts
    gang = load_gang(directory, check_model(directory), (0, NUM_LAYERS), 2, 16, 9)
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    for shard, stage in enumerate(gang.stages):
        held = dict(stage.module.named_parameters())
        name = next(name for name in held if name.startswith("model.layers.0.") and name.endswith("gate_up_proj"))
        part = torch.cat([gate.chunk(2, dim=1)[shard], up.chunk(2, dim=1)[shard]], dim=1)
        assert torch.equal(held[name], part)
        down = held[name.replace("gate_up_proj", "down_proj")]
        assert torch.equal(down, experts.down_proj.chunk(2, dim=2)[shard])


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    config = transformers.CONFIG_MAPPING["deepseek_v3" if kind == "kimi_k2" else kind]()
    for key, value in TEXT_PARTS[kind].defaults.items():
        found = config.rope_parameters.get(key, 1.0) if key in ("rope_theta", "partial_rotary_factor") else None
        assert (getattr(config, key) if found is None else found) == value, key


def test_a_text_config_may_leave_out_what_has_a_default(saved: Saved, tmp_path: Path) -> None:
    """The published config.json of gemma-3-4b-it names only six keys in it."""
    sizes = ("vocab_size", "num_attention_heads", "max_position_embeddings", "num_key_value_heads", "head_dim")
    directory = changed(saved("gemma3", True), tmp_path, dict.fromkeys(sizes, ...), {})
    facts = describe_config(directory)
    assert (facts.model_type, facts.vocab_size, facts.num_heads, facts.num_kv_heads) == ("gemma3_text", 262208, 8, 4)
    assert (facts.max_position_embeddings, facts.head_dim, facts.tie_word_embeddings) == (131072, 256, True)


def test_qwen_vl_is_published_without_a_text_config(saved: Saved, tmp_path: Path) -> None:
    source = saved("qwen2_5_vl", True)
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = text | config | {"rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    model, ours = load(source, (0, NUM_LAYERS)), load(tmp_path, (0, NUM_LAYERS))
    expected = dict(model.module.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in ours.module.named_parameters())
    assert ours.module.config.rope_parameters == model.module.config.rope_parameters | {"type": "default"}
    assert ours.module.config.layer_types == model.module.config.layer_types


@pytest.mark.usefixtures("plain_linears")
def test_a_stored_lm_head_is_used_where_the_default_ties(saved: Saved, tmp_path: Path) -> None:
    """Published files of Mistral 3 hold an LM head of their own, and no tie_word_embeddings."""
    source = saved("mistral3", True)
    directory = changed(source, tmp_path, {"tie_word_embeddings": ...}, {"tie_word_embeddings": ...})
    assert not check_model(directory).tie_word_embeddings
    stored = load_file(source / "model.safetensors")["language_model.lm_head.weight"]
    assert torch.equal(load(directory, (2, 3)).module.lm_head.weight, stored)


def test_a_tensor_of_no_known_part_is_refused(saved: Saved, tmp_path: Path) -> None:
    directory = changed(saved("gemma3", True), tmp_path, {}, {}, {"extra.layers.0.weight": torch.ones(2)})
    with pytest.raises(InputError, match=r"extra.layers.0.weight is in no known part(.|\n)*  try  "):
        check_model(directory)


def test_layers_that_predict_further_tokens_are_left_aside(saved: Saved, tmp_path: Path) -> None:
    more = {"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)}
    directory = changed(saved("qwen3_5", True), tmp_path, {}, {}, more)
    notes = check_model(directory).notes
    assert any("layers that predict further tokens (mtp.fc.weight and 1 more)" in note for note in notes), notes
    load(directory, (0, NUM_LAYERS))


def test_experts_of_unknown_direction_are_refused(saved: Saved, tmp_path: Path) -> None:
    source = saved("qwen3_vl_moe", False)
    directory = changed(source, tmp_path, {"moe_intermediate_size": 64}, {})
    key = "model.language_model.layers.0.mlp.experts.down_proj"
    save_file({key: torch.ones(4, 64, 64)}, directory / "model.safetensors")
    with pytest.raises(InputError, match=r"which dimension is the input(.|\n)*  try  "):
        check_model(directory)


@pytest.mark.parametrize("kind", ["llama4", "gemma4", "paligemma"])
def test_other_multimodal_models_are_refused(kind: str, saved: Saved, tmp_path: Path) -> None:
    directory = changed(
        saved("gemma3", True), tmp_path, {}, {"model_type": kind, "architectures": ["XForConditionalGeneration"]}
    )
    with pytest.raises(UnsupportedModelError, match="a multi-modal model"):
        check_model(directory)


def test_a_text_part_of_no_supported_family_is_refused_by_its_name(saved: Saved, tmp_path: Path) -> None:
    directory = changed(saved("llava", True), tmp_path, {"model_type": "mamba"}, {})
    with pytest.raises(UnsupportedModelError, match="mamba"):
        check_model(directory)


def test_every_multimodal_model_is_made_by_a_test() -> None:
    stems = {getattr(transformers, f"{stem}Config").model_type for stem, *_ in KINDS.values()}
    assert stems == set(WRAPPERS) and wrapper.TEXT_PARTS
