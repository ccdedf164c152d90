"""A stage's layers in one compiled call: the bits equal those of separate layers, and some stages do without."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import plain_caches
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.attention.adapter import PAGED
from sarathi_pp.model.fuse.compiled_layers import CompiledLayers, choose_team, compile_layers
from sarathi_pp.model.fuse.cpu_modules import Block
from sarathi_pp.model.fuse.float_linear import has_float_gemm
from sarathi_pp.model.fuse.packed_linear import has_gemm
from sarathi_pp.model.fuse.rewrite import fuse
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import layer_windows
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.model.tensor_parallel import Summed
from tests.machine import patient
from tests.model.families import FAMILIES, build_model

pytestmark = pytest.mark.timeout(600)  # compiling is slow for many layers
_FLOAT = pytest.mark.skipif(not has_float_gemm(), reason="this processor has no AVX2, or numba is not here")
_BF16 = pytest.mark.skipif(not has_gemm(), reason="this processor has no bfloat16 products, or numba is not here")
# The dtype of the layers, and the type of their weights in memory.
KINDS = [
    pytest.param((torch.bfloat16, torch.bfloat16), marks=_BF16, id="bfloat16"),
    pytest.param((torch.float32, torch.float32), marks=_FLOAT, id="float32"),
    pytest.param((torch.float32, torch.bfloat16), marks=_FLOAT, id="float32-bfloat16"),
]
for_all_kinds = pytest.mark.parametrize("kind", KINDS)
Kind = tuple[torch.dtype, torch.dtype]
CPU = torch.device("cpu")
PAGE_SIZE, PAGES_EACH, SEQUENCES = 16, 6, 4
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

# Rounds of a run: for each sequence, the number of additional tokens.
rounds = st.lists(
    st.lists(st.tuples(st.integers(0, SEQUENCES - 1), st.integers(1, 24)), min_size=1, unique_by=lambda one: one[0]),
    min_size=1,
    max_size=5,
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(family: str, kind: Kind, **changed: Any) -> Any:
    config = FAMILIES[family]()
    config.update(SIZES | {"attention_bias": True, "num_hidden_layers": 3} | changed)
    if family == "mistral":
        config.sliding_window = 21
    dtype, held = kind
    model = build_model(family, config=config).to(dtype).requires_grad_(False)
    model.set_attn_implementation(PAGED)
    for one in model.model.layers.modules():
        if type(one) is nn.Linear:
            one.weight.data = one.weight.data.to(held)
    fuse(model, dtype)
    assert all(type(layer) is Block for layer in model.model.layers)
    return model


def run(model: Any, rounds: list[list[tuple[int, int]]], backend: str = "numba") -> list[Tensor]:
    """Return the outputs of each round, and the keys and values that were written."""
    config = model.config
    layers = config.num_hidden_layers
    windows = layer_windows(config, SUPPORTED[type(model).__name__])
    stage = StageModel(model, (0, layers), layers, windows, choose_backend(backend, CPU, PAGE_SIZE), 0)
    kv = KVShard(
        (0, layers), SEQUENCES * PAGES_EACH, PAGE_SIZE, plain_caches(layers, 2, config.head_dim), model.dtype, CPU
    )
    for layer in range(layers):
        kv.keys(layer).fill_(torch.nan)
        kv.values(layer).fill_(torch.nan)
    generator, seen, found = torch.Generator().manual_seed(1), [0] * SEQUENCES, []
    for tokens in rounds:
        spans = []
        for sequence, count in tokens:
            # Pages are scattered, and those of one sequence are in random order.
            pages = [(7 * (sequence * PAGES_EACH + page) + 5) % (SEQUENCES * PAGES_EACH) for page in range(PAGES_EACH)]
            count = min(count, PAGES_EACH * PAGE_SIZE - seen[sequence])
            if count:
                spans.append(Span(seen[sequence], count, pages, prompt=sequence % 2 == 0))
                seen[sequence] += count
        if not spans:
            continue
        num_rows = sum(span.num_tokens for span in spans)
        ids = torch.randint(0, config.vocab_size, (num_rows,), generator=generator)
        found.append(stage.forward(ids, build_inputs(spans, range(num_rows), PAGE_SIZE, CPU), kv))
    written = [torch.stack([of(kv, layer) for layer in range(layers)]) for of in (KVShard.keys, KVShard.values)]
    return [*found, *(one.nan_to_num() for one in written)]


@functools.cache
def pair(family: str, kind: Kind, **changed: int) -> tuple[Any, Any]:
    """Return the same model twice: with layers one by one, and with compiled layers."""
    one_by_one, compiled = make(family, kind, **changed), make(family, kind, **changed)
    assert compile_layers(compiled.model.layers)
    return one_by_one, compiled


WIDE = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 1408}


def cases(family: str, changed: dict[str, int]) -> list[ParameterSet]:
    """Return a family with every kind. By default, families other than llama have one or two of them."""
    windows = ("float32",) if changed else ("float32", "bfloat16")
    default = {"mistral": windows, "qwen2": ("bfloat16",), "qwen3": ("bfloat16", "float32-bfloat16")}
    found = []
    for kind in KINDS:
        full = [pytest.mark.full] if kind.id not in default.get(family, kind.id) else []
        name = f"{kind.id}-{family}" + "-wide" * bool(changed)
        found.append(pytest.param(family, changed, *kind.values, marks=[*kind.marks, *full], id=name))
    return found


@pytest.mark.parametrize(("family", "changed", "kind"), [case for family in LIKE_LLAMA for case in cases(family, WIDE)])
def test_how_a_prompt_is_cut_changes_no_bit_of_a_row(family, changed, kind):
    """This includes a single leftover token, which the decodes' kernel would otherwise compute."""
    compiled = pair(family, kind, **changed)[1]
    config, length = compiled.config, PAGES_EACH * PAGE_SIZE
    windows = layer_windows(config, SUPPORTED[type(compiled).__name__])
    layers = config.num_hidden_layers
    stage = StageModel(compiled, (0, layers), layers, windows, choose_backend("numba", CPU, PAGE_SIZE), 0)
    ids = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(2))

    def rows(bounds: list[int]) -> Tensor:
        kv = KVShard((0, layers), PAGES_EACH, PAGE_SIZE, plain_caches(layers, 2, config.head_dim), kind[0], CPU)
        found = []
        for start, end in pairwise(bounds):
            spans = [Span(start, end - start, range(PAGES_EACH), prompt=True)]
            found.append(stage.forward(ids[start:end], build_inputs(spans, range(end - start), PAGE_SIZE, CPU), kv))
        return torch.cat(found)

    whole = rows([0, length])
    for bounds in ([0, 1, length], [0, length - 1, length], [0, 16, 17, 33, length], list(range(length + 1))):
        assert torch.equal(rows(bounds), whole), bounds


@pytest.mark.parametrize(
    ("family", "changed", "kind"),
    [*(case for family in LIKE_LLAMA for case in cases(family, {})), *cases("llama", WIDE)],
)
@given(rounds=rounds, threads=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_no_bit_differs_from_the_layers_one_by_one(family, changed, kind, rounds, threads):
    """Heads of both widths run in one process, with rows long enough for sums in several orders.

    Threads divide rows, outputs, heads and tiles. With five there are fewer KV heads, and often fewer rows.
    """
    one_by_one, compiled = pair(family, kind, **changed)
    torch.set_num_threads(1)
    first = run(one_by_one, rounds)
    torch.set_num_threads(threads)
    second = run(compiled, rounds)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(bool(one.isfinite().all()) for one in first)


@for_all_kinds
def test_a_token_that_is_not_finite_stays_so_and_spoils_no_other_sequence(kind):
    model, tokens = pair("llama", kind)[1], [[(0, 5), (1, 5)], [(0, 1), (1, 1)]]
    weight = model.model.embed_tokens.weight
    before, clean = weight.clone(), run(model, tokens)
    ids = torch.randint(0, model.config.vocab_size, (10,), generator=torch.Generator().manual_seed(1))
    assert ids[0] not in ids[5:]
    try:
        weight[ids[0]] = torch.nan
        broken = run(model, tokens)
    finally:
        weight[:] = before
    others = torch.arange(model.config.vocab_size) != ids[0]  # if the head is the embedding, that logit is NaN
    assert bool(broken[0][:5].isnan().all())
    assert torch.equal(broken[0][5:, others], clean[0][5:, others])


@pytest.fixture
def never_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from sarathi_pp_kernels.cpu.decoder_layers_call import DecoderLayersCall

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("in one call")

    monkeypatch.setattr(DecoderLayersCall, "__call__", refuse)


ROUNDS = [[(0, 20), (2, 3)], [(0, 1), (1, 9)]]


@for_all_kinds
def test_other_attention_goes_layer_by_layer(kind, never_in_one_call):
    one_by_one, compiled = pair("llama", kind)
    expected, found = (run(model, ROUNDS, "sdpa") for model in (one_by_one, compiled))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@for_all_kinds
@pytest.mark.parametrize("threads", [1, 2])
def test_our_attention_does_not(kind, threads, never_in_one_call):
    torch.set_num_threads(threads)
    with pytest.raises(AssertionError, match="in one call"):
        run(pair("llama", kind)[1], ROUNDS)


@for_all_kinds
def test_the_layers_compute_on_as_many_threads_as_were_fastest(kind, monkeypatch):
    """By this clock, two threads are the fastest with few rows, and four with more. No bit depends on it."""
    from sarathi_pp_kernels.cpu.decoder_layers_call import DecoderLayersCall

    torch.set_num_threads(4)
    model = make("llama", kind)
    assert compile_layers(model.model.layers)
    expected, teams, now_s, call = run(model, ROUNDS), [], [0.0], DecoderLayersCall.__call__

    def counted(self: DecoderLayersCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        teams.append(len(kwargs["tiles"].bounds) - 1)
        fastest = 2 if x.shape[1] <= 16 else 4
        now_s[0] += 1 + abs(teams[-1] - fastest)
        return call(self, x, *args, **kwargs)

    monkeypatch.setattr(DecoderLayersCall, "__call__", counted)
    found = choose_team(model, lambda rows: run(model, [[(0, rows)]]), lambda: now_s[0])
    assert found == (2, 4) and {*teams} == {4, 2, 1}
    teams.clear()
    found = run(model, ROUNDS)
    assert teams == [4, 2] and all(map(torch.equal, expected, found))
    torch.set_num_threads(1)
    teams.clear()
    assert all(map(torch.equal, expected, run(model, ROUNDS))) and teams == [1, 1]


@for_all_kinds
def test_two_teams_at_once_do_not_wait_for_each_other_for_ever(kind):
    """The threads of both come from one pool, which has fewer threads than two teams need."""
    torch.set_num_threads(4)
    models = [make("llama", kind) for _ in range(3)]
    assert all(compile_layers(model.model.layers) for model in models)
    expected = run(models[0], ROUNDS)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            for found in pool.map(lambda model: run(model, ROUNDS), models):
                assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@for_all_kinds
def test_a_team_of_which_one_cannot_start_does_not_wait_for_it(kind, monkeypatch):
    """The error is raised, the threads that have started end, and the next microbatch is right."""
    torch.set_num_threads(3)
    compiled = pair("llama", kind)[1]
    expected, submitted, submit = run(compiled, ROUNDS), [], ThreadPoolExecutor.submit

    def failing(self: ThreadPoolExecutor, work: Any) -> Any:
        if submitted:
            raise RuntimeError("can't start new thread")
        submitted.append(submit(self, work))
        return submitted[0]

    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", failing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run(compiled, ROUNDS)
    submitted[0].result(timeout=patient(20))
    assert all(torch.equal(one, other) for one, other in zip(expected, run(compiled, ROUNDS), strict=True))


@for_all_kinds
def test_layers_that_are_not_alike_are_left_alone(kind):
    model = make("llama", kind)
    model.model.layers[1].input_layernorm.epsilon *= 2
    assert not compile_layers(model.model.layers)
    model = make("llama", kind)
    model.model.layers[2].mlp.down_proj = Summed(model.model.layers[2].mlp.down_proj, lambda summand: None)
    assert not compile_layers(model.model.layers)
    assert all(type(layer) is Block for layer in model.model.layers)


def test_layers_of_other_families_are_left_alone():
    for family in ("gpt2", "gemma2"):
        model = build_model(family).to(torch.bfloat16)
        fuse(model)
        layers = model.transformer.h if family == "gpt2" else model.model.layers
        kinds = [type(layer) for layer in layers]
        assert not compile_layers(layers) and [type(layer) for layer in layers] == kinds


@for_all_kinds
def test_what_does_not_fit_is_refused_and_not_read_beyond_its_end(kind):
    compiled = pair("llama", kind)[1].model.layers[0]
    seen: list[tuple[Tensor, dict[str, Any]]] = []
    whole = CompiledLayers.forward

    def look(self: CompiledLayers, x: Tensor, **call: Any) -> Tensor:
        seen.append((x, call))
        return whole(self, x, **call)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CompiledLayers, "forward", look)
        run(pair("llama", kind)[1], ROUNDS)
    x, call = seen[0]
    cos, sin = call["position_embeddings"]
    compiled(x, **call)
    for wrong in ((cos[..., :16], sin[..., :16]), (cos.double(), sin), (cos[:, 1:], sin[:, 1:])):
        with pytest.raises(AssertionError):
            compiled(x, **{**call, "position_embeddings": wrong})
    for rows in (x[:, 1:], x.double(), x[..., :32]):
        with pytest.raises(AssertionError):
            compiled(rows, **call)
