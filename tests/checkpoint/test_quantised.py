"""Checkpoints in published quantised forms give the floats, stages and tokens of dequantised ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint.entries import loaded_bytes, stored_bytes, weight_entries
from sarathi_pp.checkpoint.facts.config_file import ConfigFile
from sarathi_pp.checkpoint.facts.support import check_model, describe_config
from sarathi_pp.checkpoint.files import TensorEntry, open_checkpoint
from sarathi_pp.checkpoint.quantised import tensor
from sarathi_pp.checkpoint.quantised.parts import Entry, join_parts
from sarathi_pp.checkpoint.quantised.scheme import read_scheme
from sarathi_pp.checkpoint.quantised.tensor import QuantisedTensor
from sarathi_pp.checkpoint.tensor_file import Cut, ReadCount
from sarathi_pp.errors import InputError, UnsupportedModelError
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.model.loader import stage_bytes
from sarathi_pp.model.weights import HeldTypes
from tests import thinning
from tests.checkpoint.quantised import FORMS, Form, Published, answers, publish, write_published
from tests.engine.pipeline import run_pipeline
from tests.model.families import NUM_LAYERS, VOCAB_SIZE, write_checkpoint
from tests.model.shards import load_gang
from tests.model.test_stage_model import FOUR_STAGES, ONE_STAGE, TWO_STAGES, load, peaks_of_loading

# Mixtures of experts in the forms in which they are published.
CASES = [
    *(("llama", form) for form in FORMS if form != "mxfp4"),
    *(("qwen3", form) for form in ("fp8 blocks", "packed int4 groups", "awq int4")),
    *(("qwen3_moe", form) for form in ("fp8 blocks", "packed int4 groups", "gptq int4", "awq int4")),
    *(("deepseek_v3", form) for form in ("fp8 blocks", "packed int4 groups")),
    ("gpt_oss", "mxfp4"),
]
# One for each layout of codes, and a mixture of experts.
BY_DEFAULT = [
    ("llama", "fp8 blocks"),
    ("llama", "packed int4 asymmetric"),
    ("llama", "gptq int4 ordered"),
    ("qwen3", "awq int4"),
    ("qwen3_moe", "fp8 blocks"),
    ("gpt_oss", "mxfp4"),
]
oldest, full = pytest.mark.oldest, pytest.mark.full


Write = Callable[[str, str], Published]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return a writer of checkpoints, each written once. No test may change them."""
    written: dict[tuple[str, str], Published] = {}

    def write(family: str, form: str) -> Published:
        if (family, form) not in written:
            written[family, form] = write_published(family, form, tmp_path_factory.mktemp("published"))
        return written[family, form]

    return write


def entries_of(found: Published) -> Mapping[str, Entry]:
    return weight_entries(ConfigFile.read(found.quantised), open_checkpoint(found.quantised))


def change(source: Path, directory: Path, tensors: dict[str, torch.Tensor | None], settings: Any = ...) -> Path:
    """Copy a checkpoint with some tensors changed, or left out if they are None, and other settings."""
    stored = load_file(source / "model.safetensors") | tensors
    save_file({key: one for key, one in stored.items() if one is not None}, directory / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if settings is not ...:
        config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("family, form", CASES)
def test_floats_are_those_of_the_formats_library(family: str, form: str, published: Write) -> None:
    """Bit for bit, whole and in halves along both dimensions. All stored bytes of a weight are counted."""
    found = published(family, form)
    expected, quantised = load_file(found.reference / "model.safetensors"), 0
    entries = entries_of(found)
    assert set(entries) == set(expected)
    for key, entry in entries.items():
        if isinstance(entry, TensorEntry):
            continue
        quantised, count = quantised + 1, ReadCount()
        weight = QuantisedTensor(entry, count, torch.float32)
        whole = weight.read()
        assert torch.equal(whole, expected[key]), key
        assert count.num_bytes == weight.num_stored_bytes() == stored_bytes(entry), key
        assert weight.num_bytes() == loaded_bytes(entry, "float32") == whole.nbytes
        for dim, half in ((0, 0), (0, 1), (1, 0), (1, 1)) if whole.ndim == 2 else ():
            part = weight.cut(Cut(dim, 1, half, 2))
            assert torch.equal(part.read(), whole.chunk(2, dim)[half]), (key, dim, half)
            assert part.num_bytes() == whole.nbytes // 2
    assert quantised >= NUM_LAYERS * 2, "too few weights are quantised"


@pytest.mark.parametrize("form", ["fp8 blocks", "packed int4 asymmetric", "gptq int4 ordered", "awq int4"])
def test_blocks_of_any_size_give_the_same_floats(form: str, published: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    found = published("llama", form)
    expected = load_file(found.reference / "model.safetensors")
    monkeypatch.setattr(tensor, "_BLOCK_VALUES", 300)  # of 24 x 48 values and more
    for key, entry in entries_of(found).items():
        if not isinstance(entry, TensorEntry):
            assert torch.equal(QuantisedTensor(entry, ReadCount(), torch.float32).read(), expected[key]), key


@pytest.mark.parametrize(
    "family, form", [pytest.param(*case, marks=oldest if case in BY_DEFAULT else full) for case in CASES]
)
def test_stages_are_those_of_the_dequantised_checkpoint(family: str, form: str, published: Write) -> None:
    """At 1, 2 and 4 stages, and 2 stages' bytes: those stored are read, and those of floats are counted."""
    found = published(family, form)
    entries = entries_of(found)
    stored = sum(map(stored_bytes, entries.values()))
    for stages in (ONE_STAGE, TWO_STAGES, FOUR_STAGES):
        read = 0
        for layers in stages:
            ours, theirs = load(found.quantised, layers), load(found.reference, layers)
            read += ours.bytes_read
            parameters = dict(theirs.module.named_parameters())
            assert {name for name, _ in ours.module.named_parameters()} == set(parameters)
            for name, parameter in ours.module.named_parameters():
                assert torch.equal(parameter, parameters[name]), name
            assert (
                ours.num_bytes
                == theirs.num_bytes
                == stage_bytes(found.quantised, layers, HeldTypes.on("cpu", torch.float32))
            )
        shared = [entry for key, entry in entries.items() if "embed_tokens" in key]
        tied = check_model(found.quantised).tie_word_embeddings and len(stages) > 1
        assert read == stored + (sum(map(stored_bytes, shared)) if tied else 0)


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize(
    "family, form", [("llama", "packed int4 groups"), ("llama", "gptq int4 ordered"), ("qwen3_moe", "fp8 blocks")]
)
def test_shards_are_those_of_the_dequantised_checkpoint(family: str, form: str, published: Write) -> None:
    found = published(family, form)
    facts = check_model(found.quantised)
    for layers in TWO_STAGES:
        ours, theirs = (load_gang(each, facts, layers, 2, 16, 9) for each in (found.quantised, found.reference))
        for one, other in zip(ours.stages, theirs.stages, strict=True):
            parameters = dict(other.module.named_parameters())
            assert len(parameters) > 5
            for name, parameter in one.module.named_parameters():
                assert torch.equal(parameter, parameters[name]), name


@pytest.mark.parametrize(
    "family, form", [pytest.param(*case, marks=() if case in BY_DEFAULT[::2] else full) for case in CASES]
)
def test_greedy_tokens_are_those_of_transformers_on_the_dequantised_checkpoint(
    family: str, form: str, published: Write
) -> None:
    found = published(family, form)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in (5, 17, 40)]
    expected = answers(found.reference, prompts, 8)
    for stages in (2, 1, 4) if thinning.full else (2,):
        outcome = run_pipeline(found.quantised, prompts, stages=stages, chunk_size=7)
        assert [tuple(tokens) for tokens in outcome.tokens] == expected


GOLDEN = Path(__file__).with_name("gptq_awq.safetensors")
_GPTQ = (f"gptq{bits}.{kind}{order}" for bits in (4, 8) for kind in ("sym", "asym") for order in ("", ".act_order"))
GOLDEN_NAMES = [*_GPTQ, "awq4", "awq4.group16", "awq4.zeros8"]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_gptq_and_awq_are_those_of_their_libraries(name: str, tmp_path: Path) -> None:
    """Their own functions made the floats: GPTQModel 7.7.0's dequantize_weight, AutoAWQ 0.2.9's dequantize_gemm."""
    golden = load_file(GOLDEN)
    parts = {
        key: golden[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx") if f"{name}.{key}" in golden
    }
    save_file({f"a.{key}": part for key, part in parts.items()}, tmp_path / "model.safetensors")
    expected = golden[f"{name}.weight"]
    group_size = expected.shape[1] // parts["scales"].shape[0]
    settings = {"quant_method": name[:4].rstrip("4"), "group_size": group_size}
    scheme = read_scheme(ConfigFile(tmp_path, {"quantization_config": settings}))
    assert scheme is not None
    (entry,) = join_parts(open_checkpoint(tmp_path).tensors, scheme).values()
    assert not isinstance(entry, TensorEntry)
    assert torch.equal(QuantisedTensor(entry, ReadCount(), torch.float16).read(), expected)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.float8_e8m0fnu], ids=["float32", "powers of 2"])
def test_fp8_blocks_are_those_of_transformers(scale_type: torch.dtype, tmp_path: Path) -> None:
    """Blocks are whole: transformers takes their size from the shapes, so it misreads a short last block."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.randn(96, 64, generator=torch.Generator().manual_seed(4)).to(torch.float8_e4m3fn)
    scales = (torch.rand(3, 2, generator=torch.Generator().manual_seed(5)) + 0.01).to(scale_type)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    scheme = read_scheme(ConfigFile(tmp_path, {"quantization_config": FORMS["fp8 blocks"].settings}))
    assert scheme is not None
    (entry,) = join_parts(open_checkpoint(tmp_path).tensors, scheme).values()
    assert not isinstance(entry, TensorEntry)
    for dtype in (torch.float32, torch.bfloat16):
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
        assert torch.equal(QuantisedTensor(entry, ReadCount(), dtype).read(), expected)


def test_in_bfloat16_a_weight_is_rounded_once(published: Write) -> None:
    found = published("llama", "fp8 blocks")
    expected = load_file(found.reference / "model.safetensors")
    for key, entry in entries_of(found).items():
        if not isinstance(entry, TensorEntry):
            read = QuantisedTensor(entry, ReadCount(), torch.bfloat16).read()
            assert torch.equal(read, expected[key].bfloat16()), key


_Q = "model.layers.1.self_attn.q_proj"
BROKEN: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "no scale": ("fp8 blocks", {f"{_Q}.weight_scale_inv": None}, f"{_Q}.weight_scale_inv or {_Q}.weight_scale is miss"),
    "no code": ("fp8 blocks", {f"{_Q}.weight": None}, f"{_Q}.weight_scale_inv belongs to no quantised weight"),
    "scales of other blocks": (
        "fp8 blocks",
        {f"{_Q}.weight_scale_inv": torch.ones(3, 3)},
        r"\[3, 3\]; expected \[2, 2\]",
    ),
    "scales of other groups": ("packed int4 groups", {f"{_Q}.weight_scale": torch.ones(64, 2)}, r"expected \[64, 3\]"),
    "twice": ("packed int4 groups", {f"{_Q}.weight": torch.ones(64, 48)}, "stored twice"),
    "no zeros": ("awq int4", {f"{_Q}.qzeros": None}, f"{_Q}.qzeros is missing"),
    "no order": ("gptq int4", {f"{_Q}.g_idx": None}, f"{_Q}.g_idx is missing"),
    "a scale too many": (
        "gptq int4",
        {"model.norm.scales": torch.ones(2)},
        "model.norm.scales belongs to no quantised",
    ),
    "codes of another type": ("packed int4 groups", {f"{_Q}.weight_packed": torch.ones(64, 6)}, "stored as F32"),
    "3 bits": ("gptq int4", {f"{_Q}.g_idx": torch.zeros(64, dtype=torch.int32)}, "codes of 3 bits; expected 4 or 8"),
    "codes that are no matrix": (
        "awq int4",
        {f"{_Q}.qweight": torch.ones(8, dtype=torch.int32)},
        r"has the shape \[8\]; expected a matrix",
    ),
    "scales that are no matrix": (
        "gptq int4",
        {f"{_Q}.scales": torch.ones(8)},
        r"scales of .* have the shape \[8\]; expected a matrix",
    ),
    "inputs beyond whole groups": (
        "packed int4 groups",
        {f"{_Q}.weight_packed": torch.ones(64, 5, dtype=torch.int32)},
        "has 40 inputs; expected a multiple of the group size 16",
    ),
    "integers as floats": (
        "float8 channels",
        {f"{_Q}.weight": torch.ones(64, 48, dtype=torch.int8)},
        "stored as I8; expected fp8",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_parts_that_do_not_fit_are_refused_by_name(what: str, published: Write, tmp_path: Path) -> None:
    form, tensors, message = BROKEN[what]
    broken = change(published("llama", form).quantised, tmp_path, tensors)
    with pytest.raises((InputError, UnsupportedModelError), match=message) as error:
        check_model(broken)
    assert "\n  try  " in str(error.value)


def test_another_stored_shape_is_refused(published: Write, tmp_path: Path) -> None:
    source = published("llama", "packed int4 groups").quantised
    broken = change(source, tmp_path, {f"{_Q}.weight_shape": torch.tensor([64, 40])})
    with pytest.raises(InputError, match=rf"{_Q}.weight_shape is \[64, 40\]; expected \[64, 48\](.|\n)*  try  "):
        load(broken, (0, 2))


def test_a_module_that_no_target_names_is_refused(published: Write, tmp_path: Path) -> None:
    source = published("llama", "packed int4 groups").quantised
    broken = change(source, tmp_path, {}, _compressed_for(["re:.*mlp.*"]))
    with pytest.raises(InputError, match=r"k_proj.weight_packed .* expected a target(.|\n)*  try  "):
        check_model(broken)


def test_experts_of_another_shape_are_refused(published: Write, tmp_path: Path) -> None:
    source = published("gpt_oss", "mxfp4").quantised
    key = "model.layers.0.mlp.experts.down_proj_blocks"
    codes = {key: torch.ones(4, 64, 16, dtype=torch.uint8)}
    with pytest.raises(InputError, match=r"expected \[experts, outputs, groups, 16\](.|\n)*  try  "):
        check_model(change(source, tmp_path, dict(codes)))


def test_a_bias_of_zeros_beside_gptq_weights_is_left_out(published: Write, tmp_path: Path) -> None:
    source = published("qwen3", "gptq int4").quantised
    key = "model.layers.1.mlp.down_proj.bias"
    load(change(source, tmp_path, {key: torch.zeros(48)}), (0, 2))
    with pytest.raises(InputError, match=f"no place for {key}"):
        load(change(source, tmp_path, {key: torch.ones(48)}), (0, 2))


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 16} | weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def _compressed_for(targets: Any) -> dict[str, Any]:
    settings = _compressed()
    settings["config_groups"]["group_0"]["targets"] = targets
    return settings


REFUSED: dict[str, tuple[Any, str]] = {
    **{
        name: ({"quant_method": name}, rf"quantised weights \({name}\) are not read; use a checkpoint .* in fp8")
        for name in ("bitsandbytes", "torchao", "hqq", "modelopt", "quark", "fbgemm_fp8", "bitnet", "eetq", "aqlm")
    },
    "MLX": ({"bits": 4, "group_size": 64}, r"\(MLX\)"),
    "no method": ({"activation_scheme": "dynamic"}, "without quant_method"),
    "text": ("int4", r"\(int4\)"),
    "a block of one size": ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
    "2 bits": ({"quant_method": "gptq", "bits": 2}, r"gptq with bits 2 \(read: 4, 8\)"),
    "GPTQ's second layout": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, "gptq_v2"),
    "GPTQ's second layout by its other key": ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}, "gptq_v2"),
    "Marlin": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
    "AWQ for gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    "NVFP4": (_compressed() | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    "not compressed": (_compressed() | {"quantization_status": "frozen"}, "quantization_status 'frozen'"),
    "sparse": (_compressed() | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
    "rotated": (_compressed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "no groups": (_compressed() | {"config_groups": {}}, "config_groups"),
    "3 bits": (_compressed(num_bits=3), "num_bits 3"),
    "by token": (_compressed(strategy="token"), "strategy 'token'"),
    "a pattern that is none": (_compressed_for(["re:(mlp"]), r"targets \['re:\(mlp'\]"),
    "targets as text": (_compressed_for("Linear"), "targets 'Linear'"),
    "targets of numbers": (_compressed_for([1]), r"targets \[1\]"),
    "group of 0": (_compressed(group_size=0), "group_size 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_forms_are_refused_by_name_with_the_remedy(what: str, published: Write, tmp_path: Path) -> None:
    settings, message = REFUSED[what]
    refused = change(published("llama", "fp8 blocks").quantised, tmp_path, {}, settings)
    (refused / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match=message) as error:
        check_model(refused)
    assert "or the unquantised one" in str(error.value)


def test_a_group_without_weights_quantises_none(tmp_path: Path) -> None:
    """Only activations are quantised, so the weights are stored as floats."""
    write_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = _compressed()
    settings["config_groups"]["group_0"] |= {"weights": None, "input_activations": {"num_bits": 8, "dynamic": True}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    facts = check_model(tmp_path)
    assert (facts.quantised, facts.dtype) == (None, "float32")
    assert facts.notes == ("config.json quantises only activations (compressed-tensors); they are not quantised here",)
    assert describe_config(tmp_path).quantised is None
    load(tmp_path, (0, 5))


def test_bits_follow_the_rule_that_names_the_module(published: Write, tmp_path: Path) -> None:
    """Attention in 8 bits, the others in 4, as mixed checkpoints are published."""
    four, eight = FORMS["packed int4 groups"], FORMS["packed int8 channels"]
    groups = {
        "group_0": four.settings["config_groups"]["group_0"],
        "group_1": eight.settings["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]},
    }
    settings = four.settings | {"config_groups": groups}
    mixed = Form(settings, four.quantise, lambda name, weight: weight.ndim == 2 and "mlp" in name)
    write_checkpoint("llama", tmp_path / "source")
    publish(mixed, tmp_path / "source", tmp_path / "half", tmp_path / "half_reference")
    both = Form(settings, eight.quantise, lambda name, weight: name.endswith("_proj.weight") and "self_attn" in name)
    publish(both, tmp_path / "half", tmp_path / "quantised", tmp_path / "_")
    publish(both, tmp_path / "half_reference", tmp_path / "__", tmp_path / "reference")
    ours, theirs = load(tmp_path / "quantised", (0, 5)), load(tmp_path / "reference", (0, 5))
    parameters = dict(theirs.module.named_parameters())
    assert all(torch.equal(one, parameters[name]) for name, one in ours.module.named_parameters())
    assert check_model(tmp_path / "quantised").quantised == "compressed-tensors, int4, groups of 16; int8"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure a peak")
@pytest.mark.parametrize("form", ["fp8 blocks", *(pytest.param(f, marks=full) for f in ("gptq int4", "awq int4"))])
def test_loading_peaks_near_the_floats(form: str, tmp_path: Path) -> None:
    """Half of a model of 168 MB: the floats, 5 %, blocks that the loader's threads unpack, and one weight twice."""
    write_checkpoint("llama", tmp_path / "tiny")
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    publish(FORMS[form], tmp_path / "source", tmp_path / "quantised", tmp_path / "reference")
    blocks = 4 * tensor._BLOCK_VALUES * 16  # codes, floats, scales and their product
    packed = 2 * 2048 * 512 * 4 if has_float_gemm() else 0  # gate and up, while they are packed
    for grown, held in peaks_of_loading(tmp_path / "tiny", tmp_path / "quantised"):
        assert held > 40e6
        assert grown < 1.05 * held + blocks + packed, f"{grown / 1e6:.0f} MB for {held / 1e6:.0f} MB of floats"


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("form", ["gptq int4", "awq int4", "packed int4 groups"])
def test_a_quantised_lm_head(form: str, tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path / "source")
    of = FORMS[form].of
    with_head = replace(FORMS[form], of=lambda name, weight: name == "lm_head.weight" or of(name, weight))
    publish(with_head, tmp_path / "source", tmp_path / "quantised", tmp_path / "reference")
    ours, theirs = load(tmp_path / "quantised", (4, 5)), load(tmp_path / "reference", (4, 5))
    assert torch.equal(ours.module.lm_head.weight, theirs.module.lm_head.weight)


@pytest.mark.parametrize("wrong", [torch.full((48,), 99), torch.full((48,), -1), torch.zeros(48)])
def test_group_indices_that_cannot_be_are_refused(wrong: torch.Tensor, published: Write, tmp_path: Path) -> None:
    source = published("llama", "gptq int4 ordered").quantised
    with pytest.raises(InputError, match=rf"{_Q}.*expected indices of 3 groups(.|\n)*  try  "):
        load(change(source, tmp_path, {f"{_Q}.g_idx": wrong.int()}), (0, 2))


def test_merged_experts_in_blocks_are_cut_for_shards(published: Write) -> None:
    """Gate and up are two blocks of rows in one tensor."""
    codes = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(7)).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 1, generator=torch.Generator().manual_seed(8)) + 0.01
    directory = published("qwen3_moe", "fp8 blocks").quantised.parent
    key = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({key: codes, f"{key}_scale_inv": scales}, directory / "merged.safetensors")
    header = {"weight_map": dict.fromkeys((key, f"{key}_scale_inv"), "merged.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(header))
    scheme = read_scheme(ConfigFile(directory, {"quantization_config": FORMS["fp8 blocks"].settings}))
    assert scheme is not None
    (entry,) = join_parts(open_checkpoint(directory).tensors, scheme).values()
    assert not isinstance(entry, TensorEntry)
    whole = QuantisedTensor(entry, ReadCount(), torch.float32).read()
    gate, up = whole.chunk(2, dim=1)
    for shard in (0, 1):
        part = QuantisedTensor(entry, ReadCount(), torch.float32).cut(Cut(1, 2, shard, 2)).read()
        assert torch.equal(part, torch.cat([gate.chunk(2, dim=1)[shard], up.chunk(2, dim=1)[shard]], dim=1))


def _with_zero_points(source: Path, directory: Path, first: int, **weights: Any) -> Path:
    """Copy a packed checkpoint with unpacked zero points next to all scales.

    Args:
        first: value of one of them. The others are 0.
        weights: changed settings of the weights.
    """
    scales = {key: one for key, one in load_file(source / "model.safetensors").items() if key.endswith("weight_scale")}
    zeros = {key.replace("_scale", "_zero_point"): torch.zeros_like(one).to(torch.int8) for key, one in scales.items()}
    zeros[f"{_Q}.weight_zero_point"][5, 0] = first
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"]["weights"] |= weights
    return change(source, directory, dict(zeros), settings)


@pytest.mark.parametrize("form", ["packed int4 groups", "packed int8 channels"])
def test_unpacked_zero_points_of_symmetric_codes_may_be_0(form: str, published: Write, tmp_path: Path) -> None:
    """Older checkpoints have them. compressed-tensors makes the same floats with and without them."""
    found = published("llama", form)
    ours, theirs = load(_with_zero_points(found.quantised, tmp_path, 0), (0, 5)), load(found.reference, (0, 5))
    parameters = dict(theirs.module.named_parameters())
    assert all(torch.equal(one, parameters[name]) for name, one in ours.module.named_parameters())
    count = sum(map(stored_bytes, weight_entries(ConfigFile.read(tmp_path), open_checkpoint(tmp_path)).values()))
    assert ours.bytes_read == count > 0


def test_other_unpacked_zero_points_are_refused(published: Write, tmp_path: Path) -> None:
    four = published("llama", "packed int4 groups").quantised
    with pytest.raises(InputError, match=rf"zero points of {_Q}.weight_packed .* symmetric"):
        load(_with_zero_points(four, tmp_path, -3), (0, 2))
    with pytest.raises(UnsupportedModelError, match="stored as I8; expected I32"):
        load(_with_zero_points(four, tmp_path, 0, symmetric=False), (0, 2))
