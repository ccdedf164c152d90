"""Checkpoints in the quantised forms that are published, made from unquantised weights.

Codes and parts are written here by the published descriptions of the formats, without the code under test. Where a
format has a library, its own functions give the floats to compare with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.exact.answers import generate
from tests.model.families import FAMILIES, write_checkpoint

GROUP = 16
BLOCK = (32, 32)
OBLONG = (32, 16)  # in these, height and width of a block cannot be confused


@dataclass
class Quantised:
    """One weight: its parts by the ends of their names, and the floats that the format's library makes of them."""

    parts: dict[str, Tensor]
    floats: Tensor


@dataclass
class Form:
    """A published form.

    Attributes:
        settings: the quantization_config of config.json.
        quantise: makes the parts of one (out, in) weight.
        of: returns whether a stored weight is quantised in this form.
        noise: names and values of tensors beside every quantised weight, which are for activations.
    """

    settings: dict[str, Any]
    quantise: Callable[[Tensor], Quantised]
    of: Callable[[str, Tensor], bool] = lambda name, weight: weight.ndim == 2 and "_proj" in name
    noise: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Published:
    """A quantised checkpoint, and one with the floats that the format's library makes of it."""

    quantised: Path
    reference: Path


def write_published(family: str, form: str, directory: Path, config: Any = None) -> Published:
    """Write a tiny model of this family in this form. config: None for the family's own."""
    config = config or FAMILIES[family]()
    if family == "gpt_oss":
        config.update({"hidden_size": 64})  # whole groups of 32
    write_checkpoint(family, directory / "source", config=config)
    found = Published(directory / "quantised", directory / "reference")
    publish(FORMS[form], directory / "source", found.quantised, found.reference)
    return found


def answers(directory: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Return transformers' greedy answers to prompts, with end tokens disabled."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return [generate(model, tuple(prompt), num_tokens)[0] for prompt in prompts]


def publish(form: Form, source: Path, quantised: Path, reference: Path) -> None:
    """Write a quantised checkpoint, and one with the same weights as floats, from an unquantised model directory."""
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if form.of(name, weight):
            made, stem = form.quantise(weight), name.removesuffix(".weight")
            stored |= {f"{stem}{ending}": part for ending, part in made.parts.items()}
            stored |= {f"{stem}{ending}": part.clone() for ending, part in form.noise.items()}
            floats[name] = made.floats.float()
        else:
            stored[name] = floats[name] = weight
    config = json.loads((source / "config.json").read_text())
    for directory, tensors, changed in (
        (quantised, stored, {"quantization_config": form.settings, "dtype": "float32"}),
        (reference, floats, {}),
    ):
        directory.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config | changed))


def _pad(weight: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = (-size % length for size, length in zip(weight.shape, block, strict=True))
    return torch.nn.functional.pad(weight, (0, columns, 0, rows))


def _fp8_block(weight: Tensor) -> Quantised:
    height, width = BLOCK
    padded = _pad(weight, BLOCK)
    blocks = padded.view(padded.shape[0] // height, height, -1, width)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    floats = (codes.float() * scales[:, None, :, None]).view_as(padded)
    rows, columns = weight.shape
    parts = {".weight": codes.view(padded.shape)[:rows, :columns], ".weight_scale_inv": scales}
    return Quantised(parts, floats[:rows, :columns])


def _fp8_tensor(weight: Tensor) -> Quantised:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return Quantised(
        {".weight": codes, ".weight_scale_inv": scale.bfloat16()}, codes.float() * scale.bfloat16().float()
    )


def _compressed(weights: dict[str, Any], name: str, scale_dtype: torch.dtype) -> Callable[[Tensor], Quantised]:
    """Return a quantiser whose parts and floats are made by compressed-tensors itself."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor: Any = BaseCompressor.get_value_from_registry(name)

    def quantise(weight: Tensor) -> Quantised:
        most = 448.0 if weights["type"] == "float" else 2.0 ** (weights["num_bits"] - 1) - 1
        blocks = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "group": (1, GROUP), "block": OBLONG}
        height, width = blocks[weights["strategy"]]
        padded = _pad(weight, (height, width))
        view = padded.view(padded.shape[0] // height, height, -1, width)
        lowest, highest = view.amin((1, 3)), view.amax((1, 3))
        state = {"weight": weight}
        if weights["symmetric"]:
            scale = torch.maximum(lowest.abs(), highest.abs()) / most
        else:
            scale = (highest - lowest) / (2 * most + 1)
            zero = (-most - 1 - lowest / scale).round().clamp(-most - 1, most)
            state["weight_zero_point"] = zero.to(torch.int8)
        state["weight_scale"] = (scale.view(1) if weights["strategy"] == "tensor" else scale).to(scale_dtype)
        stored = compressor.compress(state, scheme)
        floats = compressor.decompress(stored, scheme)["weight"]
        return Quantised({f".{ending}": part for ending, part in stored.items()}, floats)

    return quantise


def _compressed_form(name: str, scale_dtype: torch.dtype = torch.bfloat16, **weights: Any) -> Form:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    settings = {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return Form(settings, _compressed(weights, name, scale_dtype))


def _pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack unsigned codes along the last dimension into 32-bit words, the first code in the lowest bits.

    Args:
        order: the code for each place of a word, from the lowest bits on; None for 0, 1, 2, ...
    """
    per_word = 32 // bits
    words = codes.long().view(*codes.shape[:-1], -1, per_word)
    words = words[..., list(order or range(per_word))]
    packed = sum(words[..., place] << (bits * place) for place in range(per_word))
    assert isinstance(packed, Tensor)
    return (packed - ((packed >> 31) << 32)).int()


def _grouped(weight: Tensor, bits: int, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes (in, out), zeros (groups, out), scales (groups, out) and floats (in, out) of groups of inputs.

    Args:
        order: index of the group of every input.
    """
    inputs, most = weight.T, 2**bits - 1
    count = int(order.max()) + 1
    lowest = torch.stack([inputs[order == group].amin(0) for group in range(count)]).clamp(max=0)
    highest = torch.stack([inputs[order == group].amax(0) for group in range(count)]).clamp(min=0)
    scales = ((highest - lowest) / most).half()
    zeros = (-lowest / scales.float()).round().clamp(0, most).long()
    codes = (inputs / scales.float()[order] + zeros[order]).round().clamp(0, most).long()
    return codes, zeros, scales, scales[order] * (codes - zeros[order]).half()


def _gptq(bits: int, *, act_order: bool = False) -> Callable[[Tensor], Quantised]:
    def quantise(weight: Tensor) -> Quantised:
        order = torch.arange(weight.shape[1]) // GROUP
        if act_order:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))]
        codes, zeros, scales, floats = _grouped(weight, bits, order)
        parts = {
            ".qweight": _pack(codes.T, bits).T,
            ".qzeros": _pack((zeros - 1) % 2**bits, bits),
            ".scales": scales,
            ".g_idx": order.int(),
        }
        return Quantised(parts, floats.T)

    return quantise


def _awq(weight: Tensor) -> Quantised:
    codes, zeros, scales, floats = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {".qweight": _pack(codes, 4, order), ".qzeros": _pack(zeros, 4, order), ".scales": scales}
    return Quantised(parts, floats.T)


def _mxfp4(weight: Tensor) -> Quantised:
    """Codes and scales at random: gpt_oss's experts are (experts, in, out), in groups of 32 inputs."""
    experts, inputs, outputs = weight.shape
    generator = torch.Generator().manual_seed(inputs + outputs)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8, generator=generator)
    return Quantised({"_blocks": blocks, "_scales": scales}, convert_moe_packed_tensors(blocks, scales))


FORMS: Mapping[str, Form] = {
    "fp8 blocks": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        _fp8_block,
    ),
    "fp8 tensor": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        _fp8_tensor,
        noise={".activation_scale": torch.tensor(0.5)},
    ),
    "packed int4 groups": _compressed_form("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
    "packed int4 asymmetric": _compressed_form(
        "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False
    ),
    "packed int8 channels": _compressed_form("pack-quantized", torch.float16),
    "int8 channels": _compressed_form("int-quantized"),
    "int8 asymmetric": _compressed_form("int-quantized", symmetric=False),
    "int8 tensor": _compressed_form("int-quantized", torch.float32, strategy="tensor"),
    "float8 channels": _compressed_form("float-quantized", type="float"),
    "float8 tensor": _compressed_form("naive-quantized", type="float", strategy="tensor"),
    "float8 blocks": _compressed_form("float-quantized", type="float", strategy="block", block_structure=list(OBLONG)),
    "gptq int4": Form({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, _gptq(4)),
    "gptq int4 ordered": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, _gptq(4, act_order=True)
    ),
    "gptq int8": Form({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, _gptq(8)),
    "awq int4": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "mxfp4": Form(
        {"quant_method": "mxfp4"}, _mxfp4, of=lambda name, weight: name.endswith("_proj") and weight.ndim == 3
    ),
}
