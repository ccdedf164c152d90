"""The GGUF file that llama.cpp gets: names, sizes, types, the order of rows, and the models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from sarathi_pp.bench.peers import gguf_program  # noqa: E402
from sarathi_pp.bench.peers.gguf_program import write_gguf  # noqa: E402

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
}
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (16, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (16, 32),
        QUERY: (32, 32),
        KEY: (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.mlp.gate_proj.weight": (64, 32),
        "model.layers.0.mlp.up_proj.weight": (64, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 64),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.post_attention_layernorm.weight": (32,),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def checkpoint(directory: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint of one layer, and return its weights."""
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    weights = tensors(dtype)
    save_file(weights, directory / "model.safetensors")
    return weights


def written(directory: Path, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the checkpoint. Return the tensors of the file and its keys, both by name."""
    write_gguf(directory, directory / "out.gguf", dtype)
    reader = gguf.GGUFReader(directory / "out.gguf")
    return {one.name: one for one in reader.tensors}, {name: one.contents() for name, one in reader.fields.items()}


def values(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))


@pytest.mark.parametrize("dtype", sorted(gguf_program.TYPES))
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_have_the_asked_type_and_vectors_are_float32(tmp_path: Path, dtype: str, stored: torch.dtype) -> None:
    weights = checkpoint(tmp_path, stored)
    found, _ = written(tmp_path, dtype)
    assert len(found) == len(weights)
    float32 = gguf.GGMLQuantizationType.F32
    for tensor in found.values():
        assert tensor.tensor_type == (gguf_program.TYPES[dtype] if len(tensor.shape) > 1 else float32)
    close = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "q8_0": 0.02}[dtype]
    down = weights["model.layers.0.mlp.down_proj.weight"].float()
    atol = close if dtype == "q8_0" else 0
    assert torch.allclose(values(found["blk.0.ffn_down.weight"]), down, rtol=close, atol=atol)
    assert torch.equal(values(found["output_norm.weight"]), weights["model.norm.weight"].float())


def test_bfloat16_weights_keep_their_bits(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, torch.bfloat16)
    found, _ = written(tmp_path, "bfloat16")
    bits = torch.from_numpy(np.array(found["output.weight"].data).view(np.int16))
    assert torch.equal(bits.view(torch.bfloat16), weights["lm_head.weight"])


def test_the_file_says_the_sizes(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    _, keys = written(tmp_path, "float32")
    assert keys["general.architecture"] == "llama" and len(keys["tokenizer.ggml.tokens"]) == 16
    sizes = {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "rope.dimension_count": 8,
        "rope.freq_base": 500.0,
    }
    assert {name: keys[f"llama.{name}"] for name in sizes} == sizes


def test_channels_that_llamas_rotary_embeddings_turn_together_are_neighbours(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    found, _ = written(tmp_path, "float32")
    for name, target in ((QUERY, "attn_q"), (KEY, "attn_k")):
        heads = weights[name].view(-1, 8, 32)
        rows = values(found[f"blk.0.{target}.weight"]).view(-1, 8, 32)
        assert torch.equal(rows[:, 0::2], heads[:, :4]) and torch.equal(rows[:, 1::2], heads[:, 4:])


def test_qwens_rows_keep_their_order(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, architectures=["Qwen2ForCausalLM"])
    found, keys = written(tmp_path, "float32")
    assert keys["general.architecture"] == "qwen2"
    assert torch.equal(values(found["blk.0.attn_q.weight"]), weights[QUERY])


def test_all_files_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for number, names in enumerate((list(weights)[:5], list(weights)[5:])):
        save_file({name: weights[name] for name in names}, tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    assert len(written(tmp_path, "float32")[0]) == len(weights)


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    checkpoint(tmp_path, tie_word_embeddings=True)
    assert "output.weight" not in written(tmp_path, "float32")[0]


def test_llama3s_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    checkpoint(tmp_path, rope_parameters=rope)
    factors = values(written(tmp_path, "float32")[0]["rope_freqs.weight"])
    config = LlamaConfig(**{**CONFIG, "rope_parameters": rope})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500.0 ** -(torch.arange(0, 8, 2) / 8)
    assert torch.allclose(plain / factors, expected, rtol=1e-5) and 1 < factors.max() <= 8 and factors.min() == 1


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "a GemmaForCausalLM; only these can be converted: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rotary embeddings of type yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rotary embeddings of type linear"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary embeddings"),
        ({"quantization_config": {}}, "quantised weights"),
    ],
)
def test_a_model_that_the_file_could_not_describe_is_refused(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    checkpoint(tmp_path, **changed)
    with pytest.raises(ValueError, match="the model") as raised:
        write_gguf(tmp_path, tmp_path / "out.gguf", "float32")
    assert named in str(raised.value)


def test_a_window_that_is_not_used_is_no_window(tmp_path: Path) -> None:
    checkpoint(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False)
    assert written(tmp_path, "float32")


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    save_file({**weights, "model.layers.0.extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.extra\.weight, which is no tensor of LlamaForCausalLM"):
        write_gguf(tmp_path, tmp_path / "out.gguf", "float32")
