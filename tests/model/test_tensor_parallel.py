"""Stages split over tensor shards, against the unmodified transformers model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint import stored_tensor
from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.support import check_model, check_shards
from sarathi_pp.checkpoint.files import SINGLE_FILE, open_checkpoint
from sarathi_pp.checkpoint.stored_tensor import StoredTensor
from sarathi_pp.checkpoint.tensor_file import Cut, ReadCount
from sarathi_pp.errors import ConfigError, UnsupportedModelError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.fuse.cpu_modules import Block, GatedMLP, RotaryAttention
from sarathi_pp.model.fuse.packed_linear import PackedLinear, has_gemm
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.loader import load_stage
from sarathi_pp.model.tensor_parallel import Split, Summed, TensorShard
from tests import thinning
from tests.commands.processes import environment
from tests.machine import patient
from tests.model.families import FAMILIES, NUM_LAYERS, VOCAB_SIZE, architecture, thinned, write_checkpoint
from tests.model.shards import load_gang
from tests.model.test_stage_model import (
    NUM_PAGES,
    ONE_STAGE,
    PAGE_SIZE,
    TWO_STAGES,
    load,
    prompts,
    relative_error,
    run_schedule,
)

CPU = torch.device("cpu")
PROVEN = [name for name in FAMILIES if SUPPORTED[architecture(name)].widths is not None]
needs_gemm = pytest.mark.skipif(not has_gemm(), reason="this processor has no bfloat16 products, or numba is not here")

Saved = Callable[..., tuple[Path, Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Write a family's checkpoint with other sizes once. Return its directory and reference model."""
    written: dict[str, tuple[Path, Any]] = {}

    def save(family: str, **changed: int) -> tuple[Path, Any]:
        key = f"{family} {changed}"
        if key not in written:
            config = FAMILIES[family]()
            config.update(changed)
            directory = tmp_path_factory.mktemp(family)
            written[key] = directory, write_checkpoint(family, directory, config=config)
        return written[key]

    return save


def gangs(directory: Path, layers: tuple[tuple[int, int], ...], size: int, **how: Any) -> list[Any]:
    facts = check_model(directory)
    return [load_gang(directory, facts, part, size, PAGE_SIZE, NUM_PAGES, **how) for part in layers]


def greedy(stages: list[Any], prompt: list[int], num_tokens: int) -> list[int]:
    """Return the output tokens of one sequence: the prompt in chunks of 7, then decodes."""
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        count = min(7, len(tokens) - done)
        inputs = build_inputs([Span(done, count, range(NUM_PAGES))], (count - 1,), PAGE_SIZE, CPU)
        x = torch.tensor(tokens[done : done + count])
        for stage in stages:
            x = stage.forward(x, inputs)
        done += count
        if done == len(tokens):
            tokens.append(int(x[0].argmax()))
    return tokens[len(prompt) :]


def expected_greedy(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    answer = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(
    "layers",
    [pytest.param(ONE_STAGE, marks=pytest.mark.full), TWO_STAGES],
    ids=["one", "two"],
)
@pytest.mark.parametrize("family", thinned(PROVEN, oldest=True))
def test_shards_together_give_the_whole_models_logits(
    family: str, layers: tuple[tuple[int, int], ...], saved: Saved, record_property: Any
) -> None:
    """Gang checks the same bits on every shard. The greedy tokens must be those of transformers.

    By default they are few, because the logits of SCHEDULE decide them too.
    """
    directory, reference = saved(family)
    stages = gangs(directory, layers, 2)
    answers = run_schedule(stages, check_model(directory))
    assert sum(map(len, answers.values())) > 60  # of 88 positions
    error = relative_error(answers, reference)
    record_property("relative_error", error)
    assert error < 1e-5
    if thinning.full:
        whole = run_schedule([load(directory, part, backend="auto") for part in layers], check_model(directory))
        largest = max(logits.abs().max().item() for rows in whole.values() for logits in rows.values())
        apart = max(
            (whole[name][at] - row).abs().max().item() for name, rows in answers.items() for at, row in rows.items()
        )
        assert apart / largest < 1e-5
    found: set[int] = set()
    num_tokens = 12 if thinning.full else 5
    for prompt in (ids[:23].tolist() for ids in prompts().values()):
        tokens = greedy(stages, prompt, num_tokens)
        assert tokens == expected_greedy(reference, prompt, num_tokens)
        found |= set(tokens)
    assert len(found) > 3


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(more, marks=pytest.mark.full) for more in ("llama", "qwen3"))]
)
def test_four_shards(family: str, saved: Saved) -> None:
    directory, reference = saved(family, num_key_value_heads=4)
    stages = gangs(directory, TWO_STAGES, 4, backend="sdpa")
    assert relative_error(run_schedule(stages, check_model(directory)), reference) < 1e-5
    prompt = prompts()["b"].tolist()
    assert greedy(stages, prompt, 16) == expected_greedy(reference, prompt, 16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_what_a_row_gives_depends_on_its_own_sequence_alone(family: str, saved: Saved) -> None:
    directory, _ = saved(family)
    facts = check_model(directory)
    if choose_backend("auto", CPU, PAGE_SIZE).name != "numba":
        pytest.skip("numba's attention is not here")
    stages = gangs(directory, TWO_STAGES, 2)
    lengths = {name: len(ids) for name, ids in prompts().items()}
    together = run_schedule(stages, facts, (tuple(lengths.items()),))
    for name, rows in run_schedule(stages, facts).items():
        assert all(torch.equal(logits, together[name][at]) for at, logits in rows.items()), name


def test_every_sum_matters(saved: Saved) -> None:
    """Leaving out any one of them changes the result."""
    directory, reference = saved("llama")
    (gang,) = gangs(directory, ONE_STAGE, 2)
    facts = check_model(directory)
    for layer, path in ((0, "self_attn.o_proj"), (4, "mlp.down_proj")):
        changed = [stage.module.model.layers[layer].get_submodule(path) for stage in gang.stages]
        kept = [summed._all_reduce for summed in changed]
        for summed in changed:
            summed._all_reduce = lambda x: x
        with pytest.raises(AssertionError, match="shards differ"):
            run_schedule([gang], facts)
        for summed, all_reduce in zip(changed, kept, strict=True):
            summed._all_reduce = all_reduce
    assert relative_error(run_schedule([gang], facts), reference) < 1e-5


def test_a_layer_adds_up_twice(saved: Saved) -> None:
    """One sum follows attention, one follows the MLP or all experts: nothing else is sent."""
    for family in ("llama", "mixtral", "qwen2_moe"):
        directory, _ = saved(family)
        (gang,) = gangs(directory, ONE_STAGE, 2)
        inputs = build_inputs([Span(0, 3, range(1))], (2,), PAGE_SIZE, CPU)
        gang.forward(torch.tensor([5, 6, 7]), inputs)
        assert gang.total.num_calls == 2 * NUM_LAYERS, family


# The tensors of a layer that are split in rows of the stored tensor, and in columns. All others are whole.
ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.", "query_key_value.", "h_to_4h.", "fc1.", "c_fc.")
COLUMNS = ("o_proj.", "down_proj.", "attention.dense.", "self_attn.dense.", "4h_to_h.", "fc2.", "mlp.c_proj.")


def of_shard(key: str, index: int, size: int, *, shared: bool) -> tuple[slice | EllipsisType, ...] | None:
    """Return a shard's part of a stored tensor; None if it has no part. shared: shared experts are split too."""
    name = key.replace(".w1.", ".gate_proj.").replace(".w3.", ".up_proj.").replace(".w2.", ".down_proj.")
    if "layers." not in name or ("shared_" in name and not shared):
        return (...,)

    def part(length: int) -> slice:
        return slice(index * length // size, (index + 1) * length // size)

    if any(one in name for one in ROWS):
        return (part(LENGTHS[key][0]),)
    if any(one in name for one in COLUMNS):
        if name.endswith("bias"):
            return (...,) if index == 0 else None
        return slice(None), part(LENGTHS[key][1])
    return (...,)


LENGTHS: dict[str, tuple[int, ...]] = {}


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("family", PROVEN)
def test_a_shard_reads_its_own_bytes_only(family: str, saved: Saved, tmp_path: Path) -> None:
    """All other bytes of the weights are NaN, and none of them reaches the result."""
    source, reference = saved(family)
    shared = any("shared_experts" in name for name in reference.config.base_model_tp_plan)
    stored = load_file(source / SINGLE_FILE)
    LENGTHS.update({key: tuple(tensor.shape) for key, tensor in stored.items()})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    total = sum(tensor.numel() for tensor in stored.values())
    for index in range(2):
        poisoned, own = {}, 0
        for key, tensor in stored.items():
            poisoned[key] = torch.full_like(tensor, torch.nan)
            part = of_shard(key, index, 2, shared=shared)
            if part is not None:
                poisoned[key][part] = tensor[part]
                own += tensor[part].numel()
        save_file(poisoned, tmp_path / SINGLE_FILE)
        shard = TensorShard(index, 2, lambda x: x)
        backend = choose_backend("sdpa", CPU, PAGE_SIZE)
        stage = load_stage(tmp_path, (0, NUM_LAYERS), NUM_LAYERS, torch.float32, CPU, backend, shard=shard)
        assert all(parameter.isfinite().all() for parameter in stage.module.parameters())
        held = {tensor.data_ptr(): tensor.numel() * 4 for tensor in stage.module.state_dict().values()}
        assert stage.bytes_read == 4 * own == sum(held.values())
        assert own < 0.75 * total  # half of a layer, too, except for embedding, head and shared experts


def test_experts_stored_in_one_tensor(saved: Saved, tmp_path: Path) -> None:
    _, reference = saved("mixtral")
    reference.save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(tmp_path / SINGLE_FILE))
    stages = gangs(tmp_path, TWO_STAGES, 2)
    assert relative_error(run_schedule(stages, check_model(tmp_path)), reference) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (8, 6), (4, 12, 6)])
def test_parts_are_slices(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds also if conversion is by blocks that end inside a piece."""
    monkeypatch.setattr(stored_tensor, "BLOCK_BYTES", 28)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file({"a": tensor}, tmp_path / SINGLE_FILE)
    entry = open_checkpoint(tmp_path).tensors["a"]
    for dim, length in enumerate(shape):
        for blocks, size in ((1, 2), (2, 2), (1, 1), (2, 3)):
            if length % (blocks * size):
                continue
            parts = torch.cat(tensor.chunk(blocks, dim), dim) if blocks == 1 else tensor
            for index in range(size):
                chosen = torch.cat([block.chunk(size, dim)[index] for block in parts.chunk(blocks, dim)], dim)
                count = ReadCount()
                stored = StoredTensor(entry, count, dtype).cut(Cut(dim, blocks, index, size))
                found = stored[...]
                assert found.shape == stored.shape == chosen.shape
                assert torch.equal(found, chosen.to(found.dtype))
                assert count.num_bytes == chosen.nbytes and stored.num_bytes() == chosen.numel() * dtype.itemsize


def bf16_logits(stage: Any, ids: torch.Tensor, kv: Any = None) -> torch.Tensor:
    found = []
    for start, count in ((0, 20), (20, 16), (36, 1)):
        inputs = build_inputs([Span(start, count, (4, 2, 7, 0, 8))], range(count), 16, CPU)
        found.append(stage.forward(ids[start : start + count], inputs, kv))
    return torch.cat(found).float()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral"])
def test_bfloat16_is_as_near_to_float32_as_the_whole_stage(family: str, saved: Saved) -> None:
    """This is the users' path. It is fused if this machine has the products for it, otherwise packed or plain."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    directory, reference = saved(family, **sizes)
    facts = check_model(directory)
    ids = prompts()["a"][:37]
    gang = load_gang(directory, facts, (0, NUM_LAYERS), 2, 16, 9, dtype=torch.bfloat16)
    whole = load_gang(directory, facts, (0, NUM_LAYERS), 1, 16, 9, dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = reference(ids[None], use_cache=False).logits[0]
    error, expected = ((bf16_logits(stage, ids) - exact).norm() / exact.norm() for stage in (gang, whole))
    assert error < max(1.5 * expected, 2e-2), (error, expected)


@needs_gemm
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shards_are_fused_like_whole_stages(family: str, saved: Saved) -> None:
    directory, _ = saved(family, hidden_size=64, head_dim=32, intermediate_size=64)
    gang = load_gang(directory, check_model(directory), (0, NUM_LAYERS), 2, 16, 9, dtype=torch.bfloat16)
    for stage in gang.stages:
        for layer in stage.module.model.layers:
            assert type(layer) is Block
            assert type(layer.self_attn) is RotaryAttention and type(layer.mlp) is GatedMLP
            assert (layer.self_attn.num_heads, layer.self_attn.num_kv_heads, layer.mlp.width) == (2, 1, 32)
            for summed in (layer.self_attn.o_proj, layer.mlp.down_proj):
                assert type(summed) is Summed and type(summed.summand) is PackedLinear


def test_one_shard_is_the_whole_stage(saved: Saved) -> None:
    directory, _ = saved("gpt2")  # for every family
    (gang,) = gangs(directory, ONE_STAGE, 1)
    assert gang.stages[0].bytes_read == load(directory, (0, NUM_LAYERS)).bytes_read
    assert not any(isinstance(module, Summed) for module in gang.stages[0].module.modules())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in PROVEN])
def test_what_is_not_proven_is_refused(family: str, saved: Saved) -> None:
    directory, _ = saved(family)
    with pytest.raises(UnsupportedModelError, match="tensor-parallel-size 2; .sarathi-pp doctor --models. lists"):
        check_shards(directory, 2)
    with pytest.raises(UnsupportedModelError, match="not proven exact in tensor shards"):
        gangs(directory, ONE_STAGE, 2)


@pytest.mark.parametrize(
    "changed, size, message",
    [
        ({}, 4, r"is 4; the model has 2 KV heads.*\n.*tensor-parallel-size 1, 2$"),
        ({"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 16}, 3, r"3; the model has 4 KV heads"),
        ({"intermediate_size": 63}, 2, r"is 2; the model has 63 intermediate_size.*\n.*tensor-parallel-size 1$"),
    ],
)
def test_what_does_not_divide_is_refused(changed: dict[str, int], size: int, message: str, saved: Saved) -> None:
    directory, _ = saved("llama", **changed)
    with pytest.raises(ConfigError, match=message):
        check_shards(directory, size)
    with pytest.raises(ConfigError, match=message):
        gangs(directory, ONE_STAGE, size)


def test_a_width_that_config_json_does_not_name_is_refused_when_it_is_split(saved: Saved, tmp_path: Path) -> None:
    source, _ = saved("llama", intermediate_size=63)
    config = json.loads((source / "config.json").read_text())
    del config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / SINGLE_FILE).write_bytes((source / SINGLE_FILE).read_bytes())
    with pytest.raises(ConfigError, match="_proj.* has 63 channels to split"):
        gangs(tmp_path, ONE_STAGE, 2)


@pytest.mark.parametrize("plan", [None, {}, {"layers.*.mlp.up_proj": "colwise_gather_output"}, {"norm": "colwise"}])
def test_a_plan_that_is_not_known_is_refused(plan: dict[str, str] | None) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        Split(plan, SUPPORTED["LlamaForCausalLM"], (0, 1), TensorShard(0, 2, lambda x: x))


def test_an_embedding_that_the_plan_splits_is_whole_all_the_same(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of transformers before 5.21 add it to the plan of a model whose head is its embedding."""
    directory, reference = saved("llama")
    assert reference.config.tie_word_embeddings
    plan = {**type(reference.config).base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    monkeypatch.setattr(type(reference.config), "base_model_tp_plan", plan)
    prompt = next(iter(prompts().values()))[:23].tolist()
    assert greedy(gangs(directory, TWO_STAGES, 2), prompt, 8) == expected_greedy(reference, prompt, 8)


def test_facts_of_a_shard(saved: Saved) -> None:
    facts = check_model(saved("qwen3")[0])
    half = facts.sharded(2)
    assert (half.num_heads, half.num_kv_heads) == (2, 1)
    assert (half.head_dim, half.hidden_size, half.fingerprint) == (facts.head_dim, 48, facts.fingerprint)
    assert facts.sharded(1) == facts


def test_checking_loads_no_torch(saved: Saved) -> None:
    program = (
        "import sys; from pathlib import Path; from sarathi_pp.checkpoint.facts.support import check_shards\n"
        "check_shards(Path(sys.argv[1]), 2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(saved("llama")[0])], check=True, timeout=patient(60))


RANK = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.model.tensor_parallel import TensorShard

torch.set_num_threads(1)
directory, store, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))

def all_reduce(x):
    dist.all_reduce(x)
    return x

facts, cpu = check_model(directory), torch.device("cpu")
part, layers = facts.sharded(2), (0, facts.num_layers)
backend = choose_backend("auto", cpu, 4)
stage = load_stage(
    directory, layers, facts.num_layers, torch.float32, cpu, backend, shard=TensorShard(rank, 2, all_reduce)
)
kv = KVShard(layers, 20, 4, part.caches, torch.float32, cpu)
ids = torch.arange(3, 48)
inputs = build_inputs([Span(0, 45, range(20))], range(45), 4, cpu)
torch.save(stage.forward(ids, inputs, kv), sys.argv[4])
dist.destroy_process_group()
"""


def test_shards_on_gloo(saved: Saved, tmp_path: Path) -> None:
    directory, reference = saved("llama")
    (tmp_path / "rank.py").write_text(RANK)
    answers = [tmp_path / f"{rank}.pt" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(tmp_path / "rank.py"),
                str(directory),
                str(tmp_path / "store"),
                str(rank),
                str(answer),
            ],
            env=environment(),
        )
        for rank, answer in enumerate(answers)
    ]
    try:
        assert [rank.wait(patient(120)) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (torch.load(answer, weights_only=True) for answer in answers)
    assert torch.equal(first, second)
    with torch.inference_mode():
        expected = reference(torch.arange(3, 48)[None], use_cache=False).logits[0]
    assert (first - expected).abs().max() / expected.abs().max() < 1e-5
    assert first.shape == (45, VOCAB_SIZE)
