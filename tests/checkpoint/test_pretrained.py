"""A config.json with a wrong value runs as in transformers, or the error names the file, key and value."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from sarathi_pp.checkpoint.facts.pretrained import load_config
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.errors import InputError, SarathiError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.loader import load_stage
from tests import thinning
from tests.model.families import NUM_LAYERS, thinned, write_checkpoint
from tests.model.test_stage_model import relative_error, run_schedule

CPU = torch.device("cpu")
# These are wrong for most keys, right for some. None is larger: transformers would allocate that much memory.
VALUES: tuple[object, ...] = ("x", "1e-6", "false", -1, 0, 1, 1.5, 70, True, None, [], {}, [1], {"a": 1})
_GONE = object()
# Values with which transformers' own float32 is as far from float64.
TOO_COARSE = [
    ("granite", "attention_multiplier", 1.5),
    ("granite", "attention_multiplier", 70),
    ("granitemoehybrid_dense", "attention_multiplier", 70),
]
# By default, these keys get text and this value. No family in VARIED has them, except those of granite.
OWN_KEYS: dict[str, dict[str, object]] = {
    "phi3": {"original_max_position_embeddings": 70},
    "granite": {
        "attention_multiplier": 0.3, "embedding_multiplier": 70, "logits_scaling": 1.5, "residual_multiplier": 1.5,
    },
    "cohere": {"layer_norm_eps": 1.5, "logit_scale": 1.5, "use_qk_norm": False},
    "smollm3": {"no_rope_layer_interval": 1, "no_rope_layers": [1]},
    "starcoder2": {"norm_epsilon": 1.5, "residual_dropout": 1, "use_bias": False},
    "opt": {"do_layer_norm_before": False, "enable_bias": False, "ffn_dim": 70, "word_embed_proj_dim": 70},
    "gpt_neox": {"use_parallel_residual": False},
    "phi": {"qk_layernorm": False},
}  # fmt: skip


def mutations(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key with every other value, and the keys of its rope parameters too, or without them."""
    for key in values:
        if key in ("architectures", "model_type"):
            continue
        for value in VALUES:
            if value != values[key] or type(value) is not type(values[key]):
                yield key, values | {key: value}
    rope = values.get("rope_parameters") or {}
    for key in rope:
        for value in (*VALUES, _GONE):
            changed = {name: held for name, held in (rope | {key: value}).items() if held is not _GONE}
            yield "rope_parameters", values | {"rope_parameters": changed}
    for name in ("yarn", "llama3", "linear"):
        for key in ("rope_parameters", "rope_scaling"):
            yield key, values | {key: {"rope_type": name}}


def load(directory: Path, facts: ModelFacts) -> Any:
    backend = choose_backend("sdpa", CPU, 4)
    return load_stage(directory, (0, facts.num_layers), facts.num_layers, torch.float32, CPU, backend)


def reference(directory: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    if any(hasattr(model.config, name) for name in ("num_experts", "num_local_experts")):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("family", thinned(few=True, also=OWN_KEYS, oldest=True))
def test_a_wrong_value_is_named_or_changes_nothing(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    changes = list(mutations(config))
    if not thinning.full:
        own = [
            (key, config | {key: wrong}) for key, value in OWN_KEYS.get(family, {}).items() for wrong in ("x", value)
        ]
        changes = own or random.Random(family).sample(changes, 5)
    for key, values in changes:
        if (family, key, values[key]) in TOO_COARSE:
            continue
        file.write_text(json.dumps(values))
        try:
            facts = check_model(tmp_path)
            stage = load(tmp_path, facts)
        except SarathiError as error:
            assert error.exit_code in (2, 65, 66), (key, values[key], error)
            # If other weights would fit a size, a bias or a rule, only the weights show the difference.
            named = str(file) in str(error) and (key in str(error) or "layer_types" in str(error))
            assert named or "config.json" in str(error) or error.exit_code == 66, (key, values[key], error)
            continue
        answers = run_schedule([stage], facts)
        assert relative_error(answers, reference(tmp_path)) < 1e-5, (key, values[key])


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "text for a number": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
    "an id beyond the vocabulary": ({"pad_token_id": 9999}, "pad_token_id is 9999"),
    "no such activation": ({"hidden_act": "swiglu"}, "hidden_act is 'swiglu'"),
    "a key that is missing": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_parameters is .*yarn",
    ),
    "text for a bool": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    "no such dtype": ({"dtype": "float99"}, "dtype is 'float99'"),
    "the older key": ({"dtype": None, "torch_dtype": "float99"}, "torch_dtype is 'float99'"),
    "uneven heads": ({"num_attention_heads": 5, "head_dim": None}, r"attention heads \(5\)"),
    "a negative size": ({"intermediate_size": -1}, "intermediate_size is -1"),
    "a dropout": ({"attention_dropout": 7}, "attention_dropout is 7"),
    "a rope factor per layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 0}}},
        "rope_parameters.full_attention.factor is 0",
    ),
    "a rope factor": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor is 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_key_and_its_value_are_named(case: str, tmp_path: Path) -> None:
    changed, message = CASES[case]
    write_checkpoint("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, check_model(tmp_path))
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_more_experts_a_token_than_there_are(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts_per_tok": 70}))
    with pytest.raises(
        InputError, match="num_experts_per_tok is 70; expected at most num_(local_)?experts, which is 4"
    ):
        check_model(tmp_path)


def test_a_shape_that_config_does_not_ask_for_is_named(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 130}))
    with pytest.raises(InputError, match=r"tensor \S+ has the shape \[128, 48\], and config.json asks for \[130, 48\]"):
        load(tmp_path, check_model(tmp_path))


def test_the_user_sees_no_advice_of_transformers_about_config_json(tmp_path, caplog):
    """It recommends another key for the factors of Phi-3.5, on each rank."""
    write_checkpoint("phi3_longrope", tmp_path)
    transformers_logging.warning_once.cache_clear()
    caplog.clear()
    load_config(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize(("family", "key"), [("deepseek_v3", "v_head_dim"), ("qwen3_next", "linear_key_head_dim")])
def test_a_missing_size_is_named_if_weights_do_not_have_its_default(family: str, key: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in config if name != key}))
    with pytest.raises(InputError, match=rf"of different models. config.json has no {key}, so defaults count"):
        load_stage(tmp_path, (0, 1), NUM_LAYERS, torch.float32, CPU, choose_backend("sdpa", CPU, 16))
