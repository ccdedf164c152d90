"""Wrong kinds of models, in the layout of the tools that publish them: the error names the kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.checkpoint.facts.support import check_config, check_model
from sarathi_pp.errors import InputError, MissingError, SarathiError, UnsafeError, UnsupportedModelError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 17209920\n"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "vocab_size": 4,
    "max_position_embeddings": 8,
}
BASE = {"config.json": LLAMA, "model.safetensors": b"weights"}
ADAPTER = {"adapter_config.json": {"base_model_name_or_path": "some/base"}, "adapter_model.safetensors": b""}

# Its files; the error; the error's text.
KINDS: dict[str, tuple[dict[str, Any], type[SarathiError], tuple[str, ...]]] = {
    "an empty folder": ({}, MissingError, ("is empty",)),
    "gguf": ({"model-q4.gguf": b"GGUF"}, UnsupportedModelError, ("GGUF", "model-q4.gguf", "safetensors")),
    "gguf with a config": ({"config.json": LLAMA, "m.gguf": b""}, UnsupportedModelError, ("GGUF", "m.gguf")),
    "adapter": (ADAPTER, UnsupportedModelError, ("is an adapter", "some/base", "merge_and_unload")),
    "adapter with a config": ({**ADAPTER, "config.json": LLAMA}, UnsupportedModelError, ("is an adapter",)),
    "adapter beside weights": (BASE | ADAPTER, UnsupportedModelError, ("would be ignored", "merge_and_unload")),
    "adapter weights alone": (BASE | {"adapter_model.bin": b""}, UnsupportedModelError, ("would be ignored",)),
    "diffusers": ({"model_index.json": {}, "unet/config.json": {}}, UnsupportedModelError, ("diffusers",)),
    "sentence-transformers": (BASE | {"modules.json": b"[]"}, UnsupportedModelError, ("embedding model",)),
    "GPTQ": (BASE | {"quantize_config.json": {}}, UnsupportedModelError, ("GPTQ", "quantization_config")),
    "AWQ": (BASE | {"quant_config.json": {}}, UnsupportedModelError, ("AWQ",)),
    "Meta's own format": ({"params.json": {}, "consolidated.00.pth": b""}, UnsupportedModelError, ("consolidated",)),
    "pickled, no config": ({"model.pth": b""}, UnsupportedModelError, ("PyTorch checkpoint (model.pth)",)),
    "pickled": ({"config.json": LLAMA, "model.ckpt": b""}, UnsafeError, ("model.ckpt", "save_pretrained")),
    "only a training's": ({"config.json": LLAMA, "training_args.bin": b""}, MissingError, ("model.safetensors",)),
    "TensorFlow": ({"config.json": LLAMA, "tf_model.h5": b""}, UnsupportedModelError, ("TensorFlow", "tf_model.h5")),
    "saved_model": ({"saved_model.pb": b""}, UnsupportedModelError, ("TensorFlow", "saved_model.pb")),
    "Flax": ({"config.json": LLAMA, "flax_model.msgpack": b""}, UnsupportedModelError, ("Flax",)),
    "ONNX": ({"config.json": LLAMA, "model.onnx": b""}, UnsupportedModelError, ("ONNX", "model.onnx")),
    "Keras": ({"model.keras": b""}, UnsupportedModelError, ("Keras",)),
    "a shard without its index": (
        {"config.json": LLAMA, "model-00001-of-00002.safetensors": b""},
        MissingError,
        ("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
    ),
    "a folder of checkpoints": ({"checkpoint-500/config.json": LLAMA}, MissingError, ("in its folder checkpoint-500",)),
    "something else": ({"notes.txt": b"hello"}, MissingError, ("config.json is not there",)),
}

# architectures, further keys of config.json; the message's text.
CLASSES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "encoder": ("BertModel", {"model_type": "bert"}, ("without an LM head", "doctor --models")),
    "masked": ("RobertaForMaskedLM", {"model_type": "roberta"}, ("an encoder",)),
    "classifier": ("LlamaForSequenceClassification", {}, ("a classifier", "LlamaForCausalLM")),
    "reward": ("InternLM2ForRewardModel", {"model_type": "internlm2"}, ("a reward model",)),
    "bare": ("Qwen3Model", {"model_type": "qwen3"}, ("without an LM head", "Qwen3ForCausalLM")),
    "encoder-decoder": (
        "T5ForConditionalGeneration",
        {"model_type": "t5", "is_encoder_decoder": True},
        ("an encoder-decoder model",),
    ),
    "vision": (
        "Qwen2_5OmniForConditionalGeneration",
        {"model_type": "qwen2_5_omni", "vision_config": {"depth": 1}},
        ("a multi-modal model (vision_config)",),
    ),
    "near": ("Qwen8NextForCausalLM", {"model_type": "qwen8_next"}, ("not supported", "nearest", "Qwen3Next")),
    "with a head": ("BertLMHeadModel", {"model_type": "bert"}, ("BertLMHeadModel is not supported",)),
    "quantised": ("DeepseekV3ForCausalLM", {"quantization_config": {"quant_method": "hqq"}}, ("quantised", "hqq")),
}


def lay_out(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.mark.parametrize("case", KINDS)
def test_a_folder_of_another_kind_is_named(case: str, tmp_path: Path) -> None:
    files, kind, parts = KINDS[case]
    lay_out(tmp_path, files)
    with pytest.raises(kind) as caught:
        check_model(tmp_path)
    assert type(caught.value) is kind
    assert all(part in str(caught.value) for part in (str(tmp_path), *parts)), caught.value
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("case", KINDS)
def test_the_names_of_a_repository_are_enough(case: str, tmp_path: Path) -> None:
    """The check works before a weight file is there."""
    files, kind, _ = KINDS[case]
    lay_out(tmp_path, {name: content for name, content in files.items() if name.endswith("config.json")})
    with pytest.raises(kind):
        check_config(tmp_path, list(files))


@pytest.mark.parametrize("case", CLASSES)
def test_a_class_of_another_kind_is_named(case: str, tmp_path: Path) -> None:
    architecture, changed, parts = CLASSES[case]
    lay_out(tmp_path, BASE | {"config.json": LLAMA | {"architectures": [architecture]} | changed})
    with pytest.raises(UnsupportedModelError) as caught:
        check_model(tmp_path)
    assert all(part in str(caught.value) for part in (str(tmp_path), *parts)), caught.value
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "notes"])
def test_a_file_is_no_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises((UnsupportedModelError, InputError), match="GGUF" if "gguf" in name else "is a file") as caught:
        check_model(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "adapter_config.json",
        "shard.safetensors",
    ],
)
def test_any_file_may_be_a_pointer(name: str, tmp_path: Path) -> None:
    files: dict[str, Any] = BASE | {name: POINTER}
    if name in ("model.safetensors.index.json", "shard.safetensors"):
        del files["model.safetensors"]
        files.setdefault("model.safetensors.index.json", {"weight_map": {"a": "shard.safetensors"}})
    lay_out(tmp_path, files)
    with pytest.raises(InputError, match="git lfs pull") as caught:
        check_model(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
