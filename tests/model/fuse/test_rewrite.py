"""Fusions of a whole stage: their targets, and every rounding at the same place as in the model."""

from __future__ import annotations

import copy
import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.attention.adapter import PAGED, PagedCall
from sarathi_pp.model.attention.spec import AttentionSpecs
from sarathi_pp.model.fuse import packed_linear
from sarathi_pp.model.fuse import rewrite as fuse_module
from sarathi_pp.model.fuse.cpu_modules import Block, GatedMLP, RotaryAttention, RowNorm
from sarathi_pp.model.fuse.float_linear import FloatLinear, has_float_gemm
from sarathi_pp.model.fuse.packed_linear import OneDnnLinear, PackedLinear, has_gemm, has_onednn
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import layer_windows
from sarathi_pp.model.stage_model import StageModel
from tests.model.families import FAMILIES, NUM_LAYERS, architecture, build_model, latent_families, thinned

needs_gemm = pytest.mark.skipif(not has_gemm(), reason="this processor has no bfloat16 products, or numba is not here")
needs_float_gemm = pytest.mark.skipif(not has_float_gemm(), reason="no AVX2, or numba is not here")
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="no packed bfloat16 products in torch")
needs_either = pytest.mark.skipif(not has_gemm() and not has_onednn(), reason="no packed bfloat16 products")
DTYPES = [pytest.param(torch.bfloat16, marks=needs_gemm), pytest.param(torch.float32, marks=needs_float_gemm)]
PACKED = {torch.bfloat16: PackedLinear, torch.float32: FloatLinear}


class Mlp(nn.Module):
    """Llama's MLP, with its code, under another name."""

    def __init__(self, hidden: int, width: int, activation: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(width, hidden, bias=True, dtype=dtype)
        self.act_fn = activation
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class Doubled(Mlp):
    def forward(self, x: Tensor) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
        return down_proj


def fused(module: nn.Module) -> Any:
    holder = nn.Sequential(copy.deepcopy(module))
    fuse(holder)
    return holder[0]


CPU = torch.device("cpu")
WITH_STATES = {name for name in FAMILIES if SUPPORTED[architecture(name)].states is not None}
PAGE_SIZE = 16


def shard(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> KVShard:
    return KVShard((0, layers), 9, PAGE_SIZE, plain_caches(layers, kv_heads, head_dim), dtype, CPU)


def wide_heads(family: str) -> Any:
    """Return the family's model.

    If its head width can be set, heads are wide enough for a pass over whole registers.
    """
    config = FAMILIES[family]()
    if hasattr(config, "head_dim") or family in ("qwen2", "granite", "qwen2_moe"):
        config.head_dim = 32
    return build_model(family, config=config)


def logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of (1, 37) token ids, in two chunks and a decode."""
    model.set_attn_implementation(PAGED)
    config, layers = model.config, model.config.num_hidden_layers
    windows = layer_windows(config, SUPPORTED[type(model).__name__])
    stage = StageModel(model, (0, layers), layers, windows, choose_backend("auto", CPU, PAGE_SIZE), 0)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    kv = shard(layers, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads)
    found, pages = [], (4, 2, 7, 0, 8)
    for start, count in ((0, 20), (20, 16), (36, 1)):
        inputs = build_inputs([Span(start, count, pages)], range(count), PAGE_SIZE, CPU)
        found.append(stage.forward(ids[0, start : start + count], inputs, kv))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33, 200])
@torch.inference_mode()
def test_a_gated_mlp_gives_the_bits_of_its_parts(rows: int, dtype: torch.dtype) -> None:
    """In float32, torch's exp has other last bits."""
    torch.manual_seed(rows)
    mlp = Mlp(64, 160, nn.SiLU(), dtype)
    x = 20 * torch.randn(1, rows, 64).to(dtype)
    x[0, 0, 0] = 3e4  # gates outside exp's range, both ways
    parts = copy.deepcopy(mlp)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(parts, name, PACKED[dtype](getattr(mlp, name)))
    ours = fused(mlp)
    assert isinstance(ours, GatedMLP)
    if dtype == torch.bfloat16:
        assert torch.equal(ours(x), parts(x))
    else:
        error = (ours(x) - parts(x)).abs().amax(-1)
        assert bool((error <= 1e-6 * parts(x).abs().amax(-1)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_mlp_that_does_something_else_is_left_alone_but_for_its_linears(dtype: torch.dtype) -> None:
    for mlp in (Doubled(64, 96, nn.SiLU(), dtype), Mlp(64, 96, nn.GELU(), dtype)):
        left = fused(mlp)
        assert type(left) is type(mlp) and type(left.gate_proj) is PACKED[dtype]
    narrow = fused(Mlp(64, 72, nn.SiLU(), dtype))  # 72 outputs are no multiple of 16
    assert type(narrow) is Mlp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("width", [16, 1024])
@torch.inference_mode()
def test_a_norm_gives_the_bits_of_llamas(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    for kind in (LlamaRMSNorm, Qwen3RMSNorm):
        norm = kind(width, eps=1e-5).to(dtype).requires_grad_(False)
        norm.weight.normal_()
        x = torch.randn(1, rows, width).to(dtype) * torch.logspace(-3, 3, rows)[:, None].to(dtype)
        ours, theirs = fused(norm)(x), norm(x)
        # The mean is summed in another order: sometimes the last bits differ, in bfloat16 the last of 8.
        bf16 = dtype == torch.bfloat16
        assert torch.allclose(ours.float(), theirs.float(), rtol=2**-7 if bf16 else 5e-7, atol=0)
        assert not bf16 or float((ours == theirs).float().mean()) > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_rounds_elsewhere_is_left_alone(dtype: torch.dtype) -> None:
    norm = Gemma2RMSNorm(32).to(dtype).requires_grad_(False)
    assert type(fused(norm)) is Gemma2RMSNorm
    assert type(fused(LlamaRMSNorm(24).to(dtype))) is LlamaRMSNorm  # no multiple of 16
    assert type(fused(LlamaRMSNorm(32).half())) is LlamaRMSNorm


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_refuses_rows_of_another_width(dtype: torch.dtype) -> None:
    """The pass takes addresses. It would read past the weight, or use the wrong part of it."""
    norm = fused(LlamaRMSNorm(32).to(dtype).requires_grad_(False))
    assert type(norm) is RowNorm
    for width in (16, 48):
        with pytest.raises(AssertionError, match="rows"):
            norm(torch.zeros(2, width, dtype=dtype))
        with pytest.raises(AssertionError, match="rows"):
            norm.after(*torch.zeros(2, 2, width, dtype=dtype))
    norm.weight = nn.Parameter(torch.ones(64, dtype=dtype)[::2], requires_grad=False)
    with pytest.raises(AssertionError, match="strides"):
        norm(torch.zeros(2, 32, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_modules_refuse_layers_of_unequal_widths(dtype: torch.dtype) -> None:
    mlp = Mlp(32, 48, nn.SiLU(), dtype)
    mlp.gate_proj = nn.Linear(32, 64, bias=False, dtype=dtype).requires_grad_(False)
    with pytest.raises(AssertionError, match="gate 64, up 48"):
        GatedMLP(mlp, dtype)
    attention = build_model("llama").model.layers[0].self_attn.to(dtype).requires_grad_(False)
    attention.v_proj = nn.Linear(attention.v_proj.in_features, 16, dtype=dtype).requires_grad_(False)
    with pytest.raises(AssertionError):
        RotaryAttention(attention, dtype)


@needs_float_gemm
def test_fused_modules_refuse_rows_with_gaps() -> None:
    with pytest.raises(AssertionError, match="40"):
        GatedMLP(Mlp(32, 40, nn.SiLU(), torch.float32), torch.float32)


def test_a_linear_layer_whose_weight_is_read_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hunyuan's router asks its linear layer for the weight's dtype, and a packed one has no weight."""
    monkeypatch.setattr(fuse_module, "packed_class", lambda linear, compute: lambda old: nn.Identity())
    model = build_model("hunyuan_v1_moe").to(torch.bfloat16)
    fuse(model, by_kernels=False)
    for layer in model.model.layers:
        assert type(layer.mlp.gate.wg) is nn.Linear and type(layer.mlp.shared_mlp.down_proj) is not nn.Linear


LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama_layer(family: str, head_dim: int, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> tuple[Any, Any]:
    """Return a layer of a model with attention over pages, and the module of its cosines and sines."""
    torch.manual_seed(head_dim)
    config = FAMILIES[family]()
    config.update(LLAMA | {"head_dim": head_dim, "attention_bias": True} | changed)
    model = build_model(family, config=config).to(dtype)
    model.set_attn_implementation(PAGED)
    return model.model.layers[0], model.model.rotary_emb


def call_of(rotary: Any, x: Tensor, spans: tuple[Span, ...], kv: KVShard, backend: str = "auto") -> dict[str, Any]:
    inputs = build_inputs(spans, (), PAGE_SIZE, CPU)
    return {
        "position_embeddings": rotary(x, inputs.position_ids[None]),
        "attention_mask": None,
        "paged": PagedCall(choose_backend(backend, CPU, PAGE_SIZE), kv, inputs, AttentionSpecs((None,))),
    }


MICROBATCHES = ((Span(0, 70, (3, 5, 1, 0, 4)), Span(0, 1, (2,))), (Span(70, 1, (3, 5, 1, 0, 4)), Span(1, 9, (2,))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_layer_gives_the_bits_of_its_parts(family: str, head_dim: int, backend: str, dtype: torch.dtype) -> None:
    """The parts are Llama's code with our own products and norms, and attention through transformers' interface."""
    layer, rotary = llama_layer(family, head_dim, dtype, rms_norm_eps=1e-2)
    ours, parts = fused(layer), copy.deepcopy(layer)
    assert type(ours) is Block and type(ours.self_attn) is RotaryAttention
    parts.input_layernorm, parts.post_attention_layernorm = ours.input_layernorm, ours.post_attention_layernorm
    parts.mlp = ours.mlp
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(parts.self_attn, name, PACKED[dtype](getattr(layer.self_attn, name)))
    if family == "qwen3":
        for name in ("q_norm", "k_norm"):
            setattr(parts.self_attn, name, RowNorm(getattr(layer.self_attn, name)))
    shards = [shard(1, 2, head_dim, dtype) for _ in range(2)]
    for spans in MICROBATCHES:
        x = torch.randn(1, sum(span.num_tokens for span in spans), 64).to(dtype)
        calls = [call_of(rotary, x, spans, kv, backend) for kv in shards]
        found = [one(x.clone(), **call) for one, call in zip((ours, parts), calls, strict=True)]
        assert torch.equal(*found) and bool(found[0].isfinite().all())
        inputs = calls[0]["paged"].inputs
        for of in (KVShard.keys, KVShard.values):
            written = [of(kv, 0)[inputs.write_pages, :, inputs.write_offsets] for kv in shards]
            assert torch.equal(*written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_threads_change_no_bit_of_a_layer(family: str, dtype: torch.dtype) -> None:
    layer, rotary = llama_layer(family, 32, dtype)
    ours, found = fused(layer), []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            torch.manual_seed(1)
            kv = shard(1, 2, 32, dtype)
            for spans in MICROBATCHES:
                x = torch.randn(1, sum(span.num_tokens for span in spans), 64).to(dtype)
                found.append(ours(x, **call_of(rotary, x, spans, kv)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[index % 2]) for index, one in enumerate(found))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_what_does_not_fit_a_layer_is_refused_and_not_read_beyond_its_end(dtype: torch.dtype) -> None:
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    layer, rotary = llama_layer("llama", 64, dtype)
    ours, x = fused(layer), torch.randn(1, 3, 64).to(dtype)
    spans = (Span(0, 3, (1,)),)
    call = call_of(rotary, x, spans, shard(1, 2, 64, dtype))
    ours(x, **call)
    cos, sin = call["position_embeddings"]
    half = {**call, "position_embeddings": (cos[..., :32], sin[..., :32])}
    for wrong in (
        half,
        {**call, "position_embeddings": (cos.to(other), sin)},
        call_of(rotary, x, spans, shard(1, 1, 64, dtype)),
        call_of(rotary, x, spans, shard(1, 2, 64, other)),
    ):
        with pytest.raises(AssertionError):
            ours(x, **wrong)
    for rows in (x[:, :2], x.to(other)):
        with pytest.raises(AssertionError):
            ours(rows, **call)
    for module in (ours.input_layernorm, ours.mlp):
        with pytest.raises(AssertionError):
            module(x.to(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_rotates_otherwise_is_left_alone(dtype: torch.dtype) -> None:
    """Glm4's forward is Llama's, but the functions that it calls differ."""
    for family in ("glm4", "smollm3"):
        model = wide_heads(family).to(dtype)
        fuse(model)
        assert not any(isinstance(module, RotaryAttention) for module in model.modules())


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_whose_norms_are_no_pair_are_left_alone(dtype: torch.dtype) -> None:
    def attention(**changed: float) -> nn.Module:
        layer, _ = llama_layer("qwen3", 32, dtype)
        for name, value in changed.items():
            setattr(layer.self_attn.k_norm, name, value)
        return layer.self_attn  # type: ignore[no-any-return]

    assert type(fused(attention())) is RotaryAttention
    assert type(fused(attention(variance_epsilon=1e-3))) is not RotaryAttention
    wider = attention()
    wider.k_norm = LlamaRMSNorm(64).to(dtype)
    assert type(fused(wider)) is not RotaryAttention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_no_weight_outlives_what_it_was_packed_into(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide_heads(family).to(dtype)
    kinds = ("q_proj.weight", "o_proj.weight", "gate_proj.weight", "down_proj.weight")
    weights = [ref(weight) for name, weight in model.named_parameters() if name.endswith(kinds)]
    layer, alive = fuse_module._layer, []

    def after_the_parts(child: nn.Module) -> Any:
        if not alive:
            gc.collect()
            alive.append(sum(weight() is not None for weight in weights))
        return layer(child)

    monkeypatch.setattr(fuse_module, "_layer", after_the_parts)
    assert len(weights) == 4 * model.config.num_hidden_layers
    fuse(model)
    assert alive == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [2, 3])
@torch.inference_mode()
def test_threads_change_no_bit(num_threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp, norm = fused(Mlp(64, 96, nn.SiLU(), dtype)), fused(LlamaRMSNorm(64).to(dtype).requires_grad_(False))
    x = torch.randn(1, 101, 64).to(dtype)
    nothing = x[:, :0]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = mlp(x), norm(x)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(mlp(x), alone[0]) and torch.equal(norm(x), alone[1])
        assert mlp(nothing).shape == norm(nothing).shape == (1, 0, 64)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("ours", [pytest.param(True, marks=needs_gemm), pytest.param(False, marks=needs_onednn)])
# The loader changes the rotary embedding of longrope, layers with a state and the products of latents. These models
# have transformers' own.
@pytest.mark.parametrize(
    "family", thinned(sorted(FAMILIES.keys() - {"phi3_longrope"} - WITH_STATES - latent_families()))
)
@torch.inference_mode()
def test_every_family_computes_what_it_did(family: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is as near to float32 as the unfused one, which has the same number of roundings."""
    if not ours:
        for module in (packed_linear, fuse_module):
            monkeypatch.setattr(module, "has_gemm", lambda: False)
    exact = wide_heads(family)
    plain = copy.deepcopy(exact).to(torch.bfloat16)
    faster = copy.deepcopy(plain)
    assert fuse(faster) >= sum(type(m) is nn.Linear for m in plain.modules()) // 3
    whole = NUM_LAYERS if family == "hunyuan_v1_moe" else 1
    assert sum(type(m) is nn.Linear for m in faster.modules()) <= whole, "all but a tied head, or routers"
    # gpt2's layers are no nn.Linear, and its head is tied.
    assert any(isinstance(m, PackedLinear) for m in faster.modules()) == (ours and family != "gpt2")
    ids = torch.arange(3, 40)[None]
    target = exact(ids).logits

    def error(found: Tensor) -> float:
        return float((found.float() - target).norm() / target.norm())

    assert error(logits(faster, ids)) < 1.3 * error(plain(ids).logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "gated", "norms", "attention", "blocks"),
    [
        ("llama", True, True, True, True),
        ("mistral", True, True, True, True),
        ("qwen2", True, True, True, True),
        ("granite", True, True, True, False),
        ("qwen3", True, True, True, True),
        ("qwen3_moe", False, True, True, True),
        ("olmo2", True, False, False, False),
        ("gemma2", False, False, False, False),
    ],
)
def test_what_applies_to_a_family(
    family: str, gated: bool, norms: bool, attention: bool, blocks: bool, dtype: torch.dtype
) -> None:
    model = wide_heads(family).to(dtype)
    layers = model.config.num_hidden_layers
    fuse(model)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(GatedMLP) == layers) == gated and (kinds.count(RowNorm) >= 2 * layers) == norms
    assert (kinds.count(RotaryAttention) == layers) == attention and (kinds.count(Block) == layers) == blocks


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=needs_either), pytest.param(torch.float32, marks=needs_float_gemm)]
)
def test_a_shared_weight_is_left_alone_and_float16_too(dtype: torch.dtype) -> None:
    tied = nn.Module()
    tied.embedding = nn.Embedding(32, 16, dtype=dtype)
    tied.head = nn.Linear(16, 32, bias=False, dtype=dtype)
    tied.head.weight = tied.embedding.weight
    assert fuse(tied) == 0 and type(tied.head) is nn.Linear
    assert fuse(nn.Sequential(nn.Linear(8, 8, dtype=torch.float16))) == 0


@needs_onednn
def test_odd_shapes_are_packed_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(33, 40, dtype=torch.bfloat16).requires_grad_(False))
    assert fuse(model) == 1 and type(model[0]) is OneDnnLinear
