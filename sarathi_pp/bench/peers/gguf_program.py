"""Write a checkpoint of safetensors as one GGUF file, the format of llama.cpp.

    python -P gguf_program.py MODEL FILE DTYPE

The file has the same weights, in the asked type. Norms and biases are float32, as in all files of llama.cpp. It has no
text of tokens, because prompts and outputs are token ids. Names of tensors and keys are those of the package gguf.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from numpy.typing import NDArray

Config = dict[str, Any]
Array = NDArray[Any]
# Class in config.json: the architecture's name in llama.cpp. Mistral has the graph of Llama.
ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
TYPES = {"float32": Type.F32, "bfloat16": Type.BF16, "float16": Type.F16, "q8_0": Type.Q8_0}
_STORED: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Stored(NamedTuple):
    """A tensor in a file of safetensors: the name of its type, and its bytes as an array of its shape."""

    dtype: str
    array: Array

    def floats(self) -> Array:
        """Return the values as float32."""
        if self.dtype == "BF16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32)


def write_gguf(model: Path, file: Path, dtype: str) -> None:
    """Write a checkpoint as a GGUF file.

    Args:
        model: directory with config.json and the weights.
        dtype: a key of TYPES, the type of all matrices.

    Raises:
        ValueError: the model has a part that this program cannot convert.
    """
    config: Config = json.loads((model / "config.json").read_text())
    _check(config)
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[_architecture(config)])
    _add_sizes(writer, config)
    tensors = {name: stored for path in sorted(model.glob("model*.safetensors")) for name, stored in _read(path)}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    names = gguf.get_tensor_name_map(_architecture(config), config["num_hidden_layers"])
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for name, (_, array) in tensors.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"the weights have {name}, which is no tensor of {config['architectures'][0]} in GGUF")
        target = _target(array, dtype)
        shape = gguf.quants.quant_shape_to_byte_shape(array.shape, target)
        writer.add_tensor_info(found, shape, np.dtype(np.uint8), math.prod(shape), target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name, stored in tensors.items():
        values = _permuted(config, name, stored.floats())
        writer.write_tensor_data(gguf.quants.quantize(values, _target(values, dtype)).view(np.uint8))
    writer.close()


def _architecture(config: Config) -> Any:
    return ARCHITECTURES[config["architectures"][0]]


def _check(config: Config) -> None:
    """Refuse a model that the file could not describe."""
    (name,) = config["architectures"]
    if name not in ARCHITECTURES:
        raise ValueError(f"the model is a {name}; only these can be converted: {', '.join(ARCHITECTURES)}")
    windows = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    rope = _rope(config)
    refused = {
        "quantised weights": "quantization_config" in config,
        "a sliding window": windows,
        f"hidden_act {config['hidden_act']}": config["hidden_act"] != "silu",
        f"rotary embeddings of type {rope['rope_type']}": rope["rope_type"] not in ("default", "llama3"),
        "partial rotary embeddings": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"the model has {what}, which this program cannot convert")


def _rope(config: Config) -> Config:
    """Return the parameters of the rotary embeddings, with the keys of transformers 5."""
    found: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_type": found.get("type", "default"), "rope_theta": config.get("rope_theta", 10000.0), **found}


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_sizes(writer: GGUFWriter, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # llama.cpp turns every output token into text. In a vocabulary of this kind, no token ends an output.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"t{token}" for token in range(config["vocab_size"])])


def _rope_factors(config: Config) -> Array | None:
    """Return by what llama.cpp divides each frequency, for rotary embeddings of type llama3. None for any other type.

    The rule is that of Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept, and those between
    the two limits are interpolated.
    """
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    exponents = np.arange(0, _head_dim(config), 2, dtype=np.float64) / _head_dim(config)
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -exponents / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors: Array = 1 / (kept + (1 - kept) / rope["factor"])
    return factors.astype(np.float32)


def _read(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file by name. Their bytes stay in the file until they are used."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _STORED:
            raise ValueError(f"{name} has type {entry['dtype']}; it must be one of {', '.join(_STORED)}")
        begin, end = entry["data_offsets"]
        yield name, Stored(entry["dtype"], data[begin:end].view(_STORED[entry["dtype"]]).reshape(entry["shape"]))


def _target(array: Array, dtype: str) -> Any:
    return TYPES[dtype] if array.ndim > 1 else Type.F32


def _permuted(config: Config, name: str, values: Array) -> Array:
    """Return the rows of a query or key projection in the order that llama.cpp's Llama needs; any other as it is.

    Its rotary embeddings turn neighbouring channels (0 and 1, 2 and 3) together. Those of transformers, and of all
    other architectures here, turn a channel and the one half a head later.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or _architecture(config) is not gguf.MODEL_ARCH.LLAMA:
        return values
    halves = values.reshape(config.get(heads) or config["num_attention_heads"], 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


if __name__ == "__main__":
    try:
        write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except ValueError as error:
        sys.exit(f"gguf: {error}")
