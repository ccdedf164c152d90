"""Refusals, and facts that agree with transformers' own defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from sarathi_pp.checkpoint.facts import support
from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.families import LEFT_OUT
from sarathi_pp.checkpoint.facts.layer_cache import token_values
from sarathi_pp.checkpoint.facts.mlp import MLPShape, read_mlp
from sarathi_pp.checkpoint.facts.pretrained import load_config
from sarathi_pp.checkpoint.facts.support import check_model, check_shards, describe_config
from sarathi_pp.errors import InputError, MissingError, SarathiError, UnsafeError, UnsupportedModelError
from sarathi_pp.model.kv import page_bytes
from tests.model.families import FAMILIES, VOCAB_SIZE, architecture, write_checkpoint

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 5,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a writer for a model of one tensor with LLAMA's config.json.

    It changes keys, and drops those that are None.
    """

    def write(**changed: Any) -> Path:
        config = {key: value for key, value in (LLAMA | changed).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_without_weights_are_the_same(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    whole = check_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    alone = describe_config(tmp_path)
    assert replace(alone, fingerprint=whole.fingerprint) == whole


@pytest.mark.parametrize(
    ("changed", "dtype", "title"),
    [
        ({}, "float32", None),
        ({"torch_dtype": "bfloat16"}, "bfloat16", None),
        ({"dtype": "float16"}, "float16", None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "bfloat16", "MXFP4"),
    ],
)
def test_the_dtype_without_weights(write: Write, changed: dict[str, Any], dtype: str, title: str | None) -> None:
    facts = describe_config(write(**changed))
    assert (facts.dtype, facts.quantised) == (dtype, title)


def test_pickled_weights_are_refused_even_if_they_are_not_loaded(tmp_path: Path, write: Write) -> None:
    (write() / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeError, match="pytorch_model.bin"):
        describe_config(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_of_a_saved_model(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path, shards=2)
    facts, config = check_model(tmp_path), model.config
    assert facts.architecture == type(model).__name__
    assert facts.model_type == config.model_type
    assert facts.num_layers == config.num_hidden_layers
    assert facts.hidden_size == config.hidden_size
    assert facts.num_heads == config.num_attention_heads
    assert facts.vocab_size == config.vocab_size
    assert facts.max_position_embeddings == config.max_position_embeddings == 512
    assert facts.tie_word_embeddings == config.tie_word_embeddings
    assert facts.dtype == "float32"


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """One config.json has no key that has a default. Another has the optional counts set to null."""
    known = SUPPORTED[architecture(family)]
    sizes = {
        known.keys.get(key, key): value
        for key, value in LLAMA.items()
        if key not in ("architectures", "model_type", "intermediate_size")
    }
    bare = sizes | {"architectures": [known.architecture], "model_type": known.model_type}
    if known.states == "mamba":
        bare["mamba_n_heads"] = 4  # the default does not divide the width
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(bare))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    facts = check_model(tmp_path)
    heads = config.num_attention_heads
    if known.latent is not None:
        assert (facts.num_kv_heads, facts.head_dim) == (1, config.kv_lora_rank + config.qk_rope_head_dim)
        assert known.latent == (config.kv_lora_rank, config.qk_rope_head_dim)
    else:
        assert facts.num_kv_heads == (getattr(config, "num_key_value_heads", None) or heads)
        assert facts.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // heads)
    assert facts.tie_word_embeddings == config.tie_word_embeddings


def test_dtype_is_that_of_most_bytes(write: Write) -> None:
    directory = write(dtype="float16")
    tensors = {"a": torch.ones(100, dtype=torch.bfloat16), "b": torch.ones(40), "c": torch.ones(99).bool()}
    save_file(tensors, directory / "model.safetensors")
    assert check_model(directory).dtype == "bfloat16"


def test_float64_is_computed_in_the_widest_type_that_runs(write: Write) -> None:
    assert check_model(write(dtype="float64")).dtype == "float32"


def test_fingerprint_sees_config_names_shapes_and_types_but_not_place(write: Write, tmp_path: Path) -> None:
    first = check_model(write()).fingerprint
    assert check_model(write()).fingerprint == first
    assert check_model(write(rms_norm_eps=1e-5)).fingerprint != first
    for tensors in ({"a": torch.ones(48)}, {"model.norm.weight": torch.ones(47)}):
        save_file(tensors, write() / "model.safetensors")
        assert check_model(tmp_path).fingerprint != first


@pytest.mark.parametrize("missing", ["directory", "config", "weights"])
def test_what_is_not_there_is_named(missing: str, write: Write) -> None:
    directory = write()
    if missing == "directory":
        directory = directory / "absent"
    else:
        (directory / {"config": "config.json", "weights": "model.safetensors"}[missing]).unlink()
    expected = {"directory": "absent", "config": "config.json", "weights": "model.safetensors"}[missing]
    with pytest.raises(MissingError, match=expected) as caught:
        check_model(directory)
    assert caught.value.exit_code == 66


def test_a_file_is_not_a_model(write: Write) -> None:
    with pytest.raises(InputError, match="is a file; give the directory"):
        check_model(write() / "config.json")


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, "FalconForCausalLM"),
    "no architecture": ({"architectures": None, "model_type": "falcon"}, "falcon"),
    "no type": ({"architectures": None, "model_type": None}, "None is not supported"),
    "architecture of another type": ({"model_type": "mistral"}, "mistral"),
    "not a list": ({"architectures": "LlamaForCausalLM"}, "not supported"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "Classification"),
    "multi-modal": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": {"model_type": "gemma4_text"},
        },
        "text_config",
    ),
    "vision tower": ({"vision_config": {"hidden_size": 8}}, "vision_config"),
    "quantised": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    "quantised for MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    "layers of several sizes": ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
    "encoder": ({"is_encoder_decoder": True}, "encoder-decoder"),
    "cross attention": ({"add_cross_attention": True}, "add_cross_attention"),
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "old rope key": ({"rope_scaling": {"type": "longrope"}}, "longrope"),
    "oldest longrope": ({"rope_scaling": {"type": "su"}}, "su"),
    "oldest longrope of Phi-3": (
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_scaling": {"type": "su"}},
        "su",
    ),
    "both rope keys": ({"rope_scaling": {"rope_type": "default", "type": "dynamic"}}, "dynamic"),
    "rope per layer type": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        "longrope",
    ),
    "linear attention": ({"layer_types": ["full_attention"] * 4 + ["linear_attention"]}, "linear_attention"),
    "chunked attention": ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_proven_is_refused_in_a_line(case: str, write: Write) -> None:
    changed, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        check_model(write(**changed))
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 330


PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", [{"type": "yarn"}, {"type": "longrope"}, {"rope_type": "longrope"}])
@pytest.mark.parametrize("top, within", [(64, None), (None, 64), (64, 32), (None, None)])
def test_phi3_has_short_factors_up_to_the_length_of_transformers(
    write: Write, key: str, name: dict[str, str], top: int | None, within: int | None
) -> None:
    """A length at the top of config.json goes before one among the factors, which transformers ignores."""
    changed = {**PHI3, key: {**name, **FACTORS}}
    if within is not None:
        changed[key]["original_max_position_embeddings"] = within
    if top is not None:
        changed["original_max_position_embeddings"] = top
    path = write(**changed)
    _, config = load_config(path)
    assert config.rope_parameters["rope_type"] == "longrope"
    assert check_model(path).longrope_after == config.rope_parameters["original_max_position_embeddings"]
    assert check_model(write()).longrope_after is None
    assert check_model(write(**PHI3)).longrope_after is None


HUNYUAN = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
ALPHA = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}


def test_a_dynamic_rope_with_alpha_is_a_fixed_table_in_hunyuan_only(write: Write) -> None:
    assert check_model(write(**HUNYUAN, rope_scaling=ALPHA)).model_type == "hunyuan_v1_dense"
    for changed in ({**HUNYUAN, "rope_scaling": ALPHA | {"alpha": None}}, {"rope_scaling": ALPHA}):
        with pytest.raises(UnsupportedModelError, match="dynamic"):
            check_model(write(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_num_experts": 4, "moe_k": 5}, "moe_k is 5; expected at most moe_num_experts, which is 4"),
        ({"n_routed_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected at most n_routed"),
        ({"n_routed_experts": 4, "n_group": 0}, "n_group is 0; expected at least 1"),
        ({"n_routed_experts": 4, "n_group": 2, "topk_group": 3}, "topk_group is 3; expected at most n_group"),
    ],
)
def test_impossible_numbers_of_experts_are_named(write: Write, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_model(write(**changed))


def test_the_numbers_that_scale_queries_are_needed(write: Write) -> None:
    ministral3 = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    with pytest.raises(InputError, match="rope_parameters.llama_4_scaling_beta is None; expected a number"):
        check_model(write(**ministral3, rope_parameters=rope))
    assert check_model(write(**ministral3, rope_parameters=rope | {"llama_4_scaling_beta": 0.1})).num_kv_heads == 8


def test_a_transformers_that_is_too_old_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(architectures=["Lfm2ForCausalLM"], model_type="lfm2")
    assert describe_config(directory).model_type == "lfm2"
    monkeypatch.setattr(support, "version", lambda package: "5.9.0")
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM needs transformers 5.22 or newer, and 5.9.0 is"):
        describe_config(directory)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
            | {"layers_block_type": ["mamba", "attention"]},
            "layers_block_type must be a list of at least 5 types",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_act": "gelu"},
            "hidden_act is 'gelu'; layers with a state support only 'silu'",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "head_dim": 32},
            "head_dim is 32, and qk_rope_head_dim is missing, so it is 64; expected the same number",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
            | {"head_dim": 32, "qk_rope_head_dim": 48},
            "head_dim is 32, and qk_rope_head_dim is 48; expected the same number",
        ),
    ],
)
def test_settings_that_fail_in_a_layer_are_refused_first(write: Write, changed: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnsupportedModelError), match=message):
        check_model(write(num_hidden_layers=5, **changed))


LATENT = [(family.architecture, family.model_type) for family in SUPPORTED.values() if family.latent is not None]


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
@pytest.mark.parametrize(("name", "model_type"), LATENT)
def test_a_null_size_of_latent_attention_is_named(name: str, model_type: str, key: str, write: Write) -> None:
    directory = write(architectures=[name], model_type=model_type)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {key: None}))
    if (model_type, key) == ("minicpm3", "v_head_dim"):
        assert load_config(directory)[1].v_head_dim == LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
        check_model(directory)
        return
    with pytest.raises(UnsupportedModelError, match=f"{key} is null; latent attention needs an integer of at least 1"):
        check_model(directory)


def test_an_odd_number_of_rotary_channels_is_named(write: Write) -> None:
    deepseek = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    with pytest.raises(UnsupportedModelError, match="qk_rope_head_dim is 15; rotary embeddings need an even number"):
        check_model(write(**deepseek, qk_rope_head_dim=15))


def test_a_token_takes_one_latent_per_layer(write: Write) -> None:
    """The sizes are those of DeepSeek-V3, under the model type of Kimi K2."""
    sizes = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128}
    sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
    directory = write(architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", **sizes)
    facts = check_model(directory)
    assert (facts.model_type, facts.latent, facts.num_heads, facts.num_kv_heads) == ("deepseek_v3", True, 128, 1)
    assert token_values(facts.caches[:1]) == 576 and token_values(facts.caches) == 61 * 576
    assert page_bytes(facts.caches, 16, torch.bfloat16) == 16 * 61 * 576 * 2
    assert load_config(directory)[1].model_type == "deepseek_v3"
    with pytest.raises(UnsupportedModelError, match="not proven exact in tensor shards"):
        check_shards(directory, 2)


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        ({}, MLPShape(64, 3)),
        ({"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}, MLPShape(64, 2)),
        ({"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}, MLPShape(32, 3, 8, 2)),
        ({"moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2}, MLPShape(32, 3, 8, 2)),
        (
            {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "model_type": "granitemoehybrid",
                "layer_types": ["attention"] * 5,
                "num_local_experts": 0,
                "shared_intermediate_size": 80,
            },
            MLPShape(80, 3),
        ),
        ({"moe_intermediate_size": [32] * 5, "num_experts": 8, "moe_topk": [2] * 5}, MLPShape(32, 3, 8, 2)),
    ],
)
def test_the_sizes_of_the_mlp(write: Write, changed: dict[str, Any], shape: MLPShape) -> None:
    directory = write(**changed)
    assert read_mlp(directory, check_model(directory)) == shape


@pytest.mark.parametrize("changed", [{}, {"block_auto_adjust_ff_dim": False}])
@pytest.mark.parametrize("width", ["intermediate_size", "block_ff_dim"])
def test_the_width_of_an_lfm2(changed: dict[str, Any], width: str, tmp_path: Path) -> None:
    lfm2 = {"block_multiple_of": 48, "block_ffn_dim_multiplier": 1.1, width: 640, "layer_types": ["conv"] * 5}
    values = {**LLAMA, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", **lfm2, **changed}
    (tmp_path / "config.json").write_text(json.dumps(values))
    _, config = load_config(tmp_path)
    with torch.device("meta"):
        module = transformers.Lfm2ForCausalLM(config)
    assert read_mlp(tmp_path, describe_config(tmp_path)).width == module.model.layers[0].feed_forward.w1.out_features


def test_the_older_name_of_a_tied_head_goes_first(write: Write) -> None:
    lfm2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv"] * 5}
    for named, older, tied in ((..., ..., True), (False, ..., False), (False, True, True), (True, False, False)):
        given = {"tie_word_embeddings": named, "tie_embedding": older}
        path = write(**lfm2, **{key: value for key, value in given.items() if value is not ...})
        if named is ...:
            values = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(
                json.dumps({k: v for k, v in values.items() if k != "tie_word_embeddings"})
            )
        assert load_config(path)[1].tie_word_embeddings == check_model(path).tie_word_embeddings == tied


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_the_reason_is_named_for_what_is_left_out(left_out: str, write: Write) -> None:
    assert hasattr(transformers, left_out) and left_out not in SUPPORTED
    with pytest.raises(UnsupportedModelError, match=f"{left_out} is not supported: it|each|the"):
        check_model(write(architectures=[left_out], model_type="other"))


def test_custom_code_is_not_run(write: Write) -> None:
    directory = write(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Evil"})
    (directory / "evil.py").write_text("raise SystemExit('this code ran')")
    note = "the Python code that config.json names (auto_map) is not run; transformers' own llama is used"
    assert check_model(directory).notes == (note,)
    load_config(directory)


def test_pickled_weights_are_refused(write: Write) -> None:
    directory = write()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsafeError, match="pickled"):
        check_model(directory)


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": None},
        {"hidden_size": "48"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": True},
        {"num_key_value_heads": -1},
        {"max_position_embeddings": 1.5},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full_attention"},
        {"tie_word_embeddings": "false"},
        {"is_encoder_decoder": "false"},
        {"attention_dropout": -0.1},
        {"sliding_window": 0},
    ],
    ids=str,
)
def test_nonsense_in_the_config_is_named(changed: dict[str, Any], write: Write) -> None:
    with pytest.raises(InputError, match="vocab_size" if None in changed.values() else next(iter(changed))):
        check_model(write(**changed))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_a_broken_config_is_named(text: str, write: Write) -> None:
    directory = write()
    (directory / "config.json").write_text(text)
    with pytest.raises(InputError, match="config.json"):
        check_model(directory)


def test_a_config_may_leave_out_the_architecture(write: Write) -> None:
    assert check_model(write(architectures=None)).architecture == "LlamaForCausalLM"


def test_checking_loads_neither_torch_nor_transformers(write: Write) -> None:
    code = (
        "import sys, pathlib; from sarathi_pp.checkpoint.facts.support import check_model; "
        "print(check_model(pathlib.Path(sys.argv[1])).num_layers, "
        "sorted({'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(write())]
    done = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert done.stdout.strip() == "5 []", done.stderr


def test_every_refusal_is_one_of_ours() -> None:
    for error in (InputError, MissingError, UnsafeError, UnsupportedModelError):
        assert issubclass(error, SarathiError)
