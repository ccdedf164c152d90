"""Slices of every family, chained over the paged cache, against the unmodified transformers model."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint.facts.families import FAMILIES as SUPPORTED
from sarathi_pp.checkpoint.facts.layer_cache import StateCache, plain_caches
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.checkpoint.stored_tensor import BLOCK_BYTES
from sarathi_pp.errors import ConfigError, InputError, MissingError, UnsupportedModelError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.attention.spec import AttentionSpecs
from sarathi_pp.model.fuse.packed_linear import PackedLinear, has_gemm, has_onednn
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import layer_windows, load_lm_head, load_stage
from sarathi_pp.model.missing_layer import MissingLayer
from sarathi_pp.model.stage_model import LMHead, StageModel
from tests import thinning
from tests.commands.processes import environment
from tests.model.families import FAMILIES, NUM_LAYERS, VARIED, VOCAB_SIZE, WINDOW, is_too_old, thinned, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_PAGES = 40
LENGTHS = {"a": 45, "b": 30, "c": 13}
SLOTS = {"a": 2, "b": 0, "c": 3}

# Each microbatch: (sequence, num_tokens), packed in this order. It has prompts longer than the window and chunks that
# end inside a page. It has decodes with chunks, two chunks of one sequence in a row, and a lone decode.
Schedule = tuple[tuple[tuple[str, int], ...], ...]
SCHEDULE: Schedule = (
    (("a", 7),),
    (("a", 13), ("b", 5)),
    (("b", 14), ("a", 1), ("c", 6)),
    (("a", 1), ("c", 1), ("b", 1)),
    (("c", 1),),
    (("a", 18), ("b", 1), ("c", 1)),
    (("a", 5), ("b", 9), ("c", 4)),
)

ONE_STAGE = ((0, 5),)
TWO_STAGES = ((0, 2), (2, 5))
FOUR_STAGES = ((0, 1), (1, 2), (2, 4), (4, 5))

Saved = Callable[[str, int], tuple[Path, Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Write a family's checkpoint once. Return its directory and reference model."""
    written: dict[tuple[str, int], tuple[Path, Any]] = {}

    def save(family: str, shards: int) -> tuple[Path, Any]:
        if (family, shards) not in written:
            directory = tmp_path_factory.mktemp(family)
            written[family, shards] = directory, write_checkpoint(family, directory, shards=shards)
        return written[family, shards]

    return save


def load(
    directory: Path, layers: tuple[int, int], dtype: torch.dtype = torch.float32, backend: str = "sdpa"
) -> StageModel:
    return load_stage(directory, layers, NUM_LAYERS, dtype, CPU, choose_backend(backend, CPU, PAGE_SIZE))


def shard(facts: ModelFacts, layers: tuple[int, int]) -> KVShard:
    kv = KVShard(layers, NUM_PAGES, PAGE_SIZE, facts.caches, torch.float32, torch.device("cpu"), num_slots=4)
    for layer in range(*layers):  # a sequence's first row does not read its slot
        if isinstance(facts.caches[layer], StateCache):
            kv.conv_state(layer).fill_(torch.nan)
            if layer in kv._recurrent:
                kv.recurrent_state(layer).fill_(torch.nan)
    return kv


def prompts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for name, n in LENGTHS.items()}


def run_schedule(
    stages: list[StageModel], facts: ModelFacts, schedule: Schedule = SCHEDULE, head: LMHead | None = None
) -> dict[str, dict[int, torch.Tensor]]:
    """Return logits by sequence and position, for every requested row. `head` replaces the last stage's own."""
    pages = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3)).tolist())
    tokens, start = prompts(), dict.fromkeys(LENGTHS, 0)
    tables: dict[str, list[int]] = {name: [] for name in LENGTHS}
    shards = [shard(facts, stage.layers) for stage in stages]
    answers: dict[str, dict[int, torch.Tensor]] = {name: {} for name in LENGTHS}
    for number, microbatch in enumerate(schedule):
        spans, ids, places = [], [], []
        for name, num_tokens in microbatch:
            first, end = start[name], start[name] + num_tokens
            while len(tables[name]) * PAGE_SIZE < end:
                tables[name].append(next(pages))
            is_long = facts.longrope_after is not None and LENGTHS[name] > facts.longrope_after
            spans.append(Span(first, num_tokens, tuple(tables[name]), long_factors=is_long, slot=SLOTS[name]))
            ids.append(tokens[name][first:end])
            places += [(name, position) for position in range(first, end)]
            start[name] = end
        # Every row, none, or every third is requested: the head must run only on these.
        rows = [] if number == 3 else list(range(0, len(places), 3 if number == 2 else 1))
        inputs = build_inputs(spans, rows, PAGE_SIZE, CPU)
        x = torch.cat(ids)
        for stage, kv in zip(stages, shards, strict=True):
            if stage.has_lm_head and head is not None and rows:
                x = head.forward(stage.forward_rows(x, inputs, kv))
                continue
            x = stage.forward(x, inputs, kv)
            if not stage.has_lm_head:
                assert x.shape == (len(places), facts.hidden_size)
        assert x.shape == (len(rows), VOCAB_SIZE)
        for row, logits in zip(rows, x, strict=True):
            name, position = places[row]
            answers[name][position] = logits
    return answers


def relative_error(answers: dict[str, dict[int, torch.Tensor]], reference: Any) -> float:
    """Return the largest difference from the full forward, over the largest absolute logit."""
    worst, largest = 0.0, 0.0
    for name, ids in prompts().items():
        with torch.inference_mode():
            expected = reference(ids[None], use_cache=False).logits[0]
        largest = max(largest, expected.abs().max().item())
        for position, logits in answers[name].items():
            worst = max(worst, (logits - expected[position]).abs().max().item())
    return worst / largest


def chained() -> Iterator[ParameterSet]:
    """Yield every family on 1, 2 and 4 stages. By default it runs on 2, and those in VARIED run on 4 too."""
    cases = {
        "one": (ONE_STAGE, 1, "auto"),
        "two-sdpa": (TWO_STAGES, 1, "sdpa"),
        "two": (TWO_STAGES, 3, "auto"),
        "four-sdpa": (FOUR_STAGES, 3, "sdpa"),
    }
    for family in FAMILIES:
        for name, case in cases.items():
            full = name in ("one", "two-sdpa") or (family not in VARIED and name != "two")
            marks = [pytest.mark.full] if full else [pytest.mark.oldest] if name == "two" else []
            yield pytest.param(family, *case, marks=marks, id=f"{family}-{name}")


@pytest.mark.parametrize("family, layers, shards, backend", list(chained()))
def test_chained_slices_give_the_whole_models_logits(
    family: str, layers: tuple[tuple[int, int], ...], shards: int, backend: str, saved: Saved, record_property: Any
) -> None:
    """The backends are the users' default (auto) and the reference of every backend (sdpa)."""
    directory, reference = saved(family, shards)
    if is_too_old(family):
        with pytest.raises(UnsupportedModelError, match="or newer, and .* is installed"):
            check_model(directory)
        return
    facts = check_model(directory)
    stages = [load(directory, part, backend=backend) for part in layers]
    answers = run_schedule(stages, facts)
    assert sum(map(len, answers.values())) > 60  # of 88 positions
    error = relative_error(answers, reference)
    record_property("relative_error", error)
    assert error < 1e-5


@pytest.mark.parametrize("family", thinned())
def test_the_head_by_itself_gives_the_bits_of_the_last_stage(family: str, saved: Saved) -> None:
    """The head also reads no other weights."""
    directory, _ = saved(family, 3)
    facts = check_model(directory)
    stages = [load(directory, part) for part in TWO_STAGES]
    head = load_lm_head(directory, torch.float32, CPU)
    width = facts.lm_head_size or facts.hidden_size
    assert head.size == width
    assert head.bytes_read <= 4 * (width + 1) * VOCAB_SIZE, "a weight, and a bias where there is one"
    schedule = SCHEDULE if thinning.full else SCHEDULE[:4]
    own = run_schedule(stages, facts, schedule)
    for one in (head, stages[-1].rows_head()):
        beside = run_schedule(stages, facts, schedule, head=one)
        for name, rows in own.items():
            differing = [position for position, logits in rows.items() if not logits.equal(beside[name][position])]
            assert rows and not differing, (name, differing)


@pytest.mark.parametrize("tied", [False, True])
def test_in_bfloat16_too(tied: bool, tmp_path: Path) -> None:
    """The LM heads are packed, also a tied one, because no stage here embeds."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB_SIZE, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    last, head = load(tmp_path, (2, 5), torch.bfloat16), load_lm_head(tmp_path, torch.bfloat16, CPU)
    kv = KVShard((2, 5), NUM_PAGES, PAGE_SIZE, plain_caches(5, 2, 16), torch.bfloat16, CPU)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    inputs = build_inputs([Span(0, 9, range(3))], (0, 3, 4, 8), PAGE_SIZE, CPU)
    if has_gemm() or has_onednn():
        assert type(head.module.lm_head) is type(last.module.lm_head) is not torch.nn.Linear
    for most_high_rows in (0, 28):  # each process measures which tiles are faster
        if isinstance(head.module.lm_head, PackedLinear):
            head.module.lm_head.most_high_rows = most_high_rows
        assert head.forward(last.forward_rows(x, inputs, kv)).equal(last.forward(x, inputs, kv))


# Their norms, activations, biases and experts are not those of VARIED.
@pytest.mark.parametrize("family", thinned(few=True, also=("cohere", "opt", "phi", "gpt_neox", "mixtral")))
def test_float32_logits_are_the_same_bits_whatever_ran_beside_them(family: str, saved: Saved) -> None:
    """A restart has other neighbours and cuts prompts elsewhere. It must still draw the same tokens."""
    directory, _ = saved(family, 1)
    facts = check_model(directory)
    stages = [load(directory, part, backend="numba") for part in TWO_STAGES]
    alone = ((("c", 1),),) * LENGTHS["c"]  # beyond the window; SCHEDULE cuts the others
    together = run_schedule(stages, facts, (tuple(LENGTHS.items()),))
    for answers in (run_schedule(stages, facts, alone), run_schedule(stages, facts)):
        for name, rows in answers.items():
            differing = [position for position, logits in rows.items() if not logits.equal(together[name][position])]
            assert not differing, (name, differing)


@pytest.mark.parametrize("num_threads", [1, 2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("width", [1000, pytest.param(1376, marks=pytest.mark.full)])
def test_so_they_are_where_threads_share_the_work(num_threads: int, width: int, tmp_path: Path) -> None:
    """Widths fill no registers, and the chunk exceeds the share of one thread."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=width, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    facts = check_model(tmp_path)
    stage = load(tmp_path, (0, NUM_LAYERS), backend="numba")
    tokens = torch.randint(3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(7))

    def logits(cuts: list[int]) -> torch.Tensor:
        kv = shard(facts, (0, NUM_LAYERS))
        parts = []
        for first, end in itertools.pairwise(cuts):
            inputs = build_inputs([Span(first, end - first, range(NUM_PAGES))], range(end - first), PAGE_SIZE, CPU)
            parts.append(stage.forward(tokens[first:end], inputs, kv))
        return torch.cat(parts)

    torch.set_num_threads(num_threads)
    whole = logits([0, 150])
    for cuts in ([0, 75, 150], [0, 1, 3, 100, 150], list(range(151))):
        assert logits(cuts).equal(whole), cuts


def test_the_proof_covers_every_supported_family() -> None:
    proven = {build().model_type for build in FAMILIES.values()}
    assert proven == {family.model_type for family in SUPPORTED.values()}


@pytest.mark.parametrize("family", thinned(name for name in FAMILIES if "opt" not in name))
def test_windows_are_those_of_the_models_masks(family: str, saved: Saved) -> None:
    """A prompt longer than the window shows a window that is missing or in the wrong layer."""
    directory, reference = saved(family, 1)
    facts = check_model(directory)
    stage = load(directory, (0, NUM_LAYERS))
    windows = stage.specs.windows
    assert set(windows) <= {None, WINDOW}
    if any(windows):
        stage.specs = AttentionSpecs((None,) * NUM_LAYERS)
        assert relative_error(run_schedule([stage], facts), reference) > 1e-4


def test_windows_follow_the_table() -> None:
    config = FAMILIES["qwen2_moe"]()
    windows = layer_windows(config, SUPPORTED["Qwen2MoeForCausalLM"])
    assert [w == WINDOW for w in windows] == [kind == "sliding_attention" for kind in config.layer_types]
    assert any(windows) and not all(windows)
    assert layer_windows(FAMILIES["mistral"](), SUPPORTED["MistralForCausalLM"]) == (WINDOW,) * NUM_LAYERS
    assert layer_windows(FAMILIES["llama"](), SUPPORTED["LlamaForCausalLM"]) == (None,) * NUM_LAYERS


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt2", "opt"])
def test_a_stage_reads_its_own_bytes_only(family: str, saved: Saved, tmp_path: Path) -> None:
    """All other bytes of the weights are NaN, and none of them reaches the result."""
    source, _ = saved(family, 1)
    stored = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    for layers in TWO_STAGES:
        whole = load(source, layers)
        layer_name = SUPPORTED[check_model(source).architecture].layers
        own = {f".{layer_name}.{i}." for i in range(*layers)}
        poisoned = {
            key: tensor
            if any(part in f".{key}" for part in own) or f".{layer_name}." not in f".{key}"
            else torch.full_like(tensor, torch.nan)
            for key, tensor in stored.items()
        }
        save_file(poisoned, tmp_path / "model.safetensors")
        stage = load(tmp_path, layers)
        assert all(parameter.isfinite().all() for parameter in stage.module.parameters())
        held = {p.data_ptr(): p.numel() * 4 for p in stage.module.parameters()}
        assert stage.bytes_read == whole.bytes_read == sum(held.values())


def test_the_slices_together_read_the_checkpoint_once(saved: Saved) -> None:
    for family, again in (("qwen3", 0), ("llama", VOCAB_SIZE * 48 * 4)):  # a tied head reads the embedding too
        directory, reference = saved(family, 1)
        num_bytes = sum(parameter.numel() * 4 for parameter in reference.parameters())
        assert sum(load(directory, part).bytes_read for part in FOUR_STAGES) == num_bytes + again


def test_a_tied_head_has_its_weight_alone_on_a_stage_that_does_not_embed(saved: Saved) -> None:
    directory, _ = saved("llama", 1)
    assert isinstance(load(directory, (4, 5)).module.get_input_embeddings(), MissingLayer)
    with pytest.raises(AttributeError):
        _ = load(directory, (1, 3)).module.lm_head.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_the_dtype_asked_for(dtype: torch.dtype, saved: Saved) -> None:
    directory, reference = saved("qwen3_moe", 1)
    stage = load(directory, (0, NUM_LAYERS), dtype)
    assert {parameter.dtype for parameter in stage.module.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in stage.module.parameters())
    expected = dict(reference.named_parameters())
    for name, parameter in stage.module.named_parameters():
        assert torch.equal(parameter, expected[name].to(dtype)), name


@pytest.mark.parametrize(
    "family, renamed",
    [
        ("gpt2", lambda key: key.removeprefix("transformer.")),
        ("gpt_neox", lambda key: key.replace("lm_head.", "embed_out.")),
        ("opt", lambda key: key.removeprefix("model.")),
    ],
)
def test_names_that_published_checkpoints_use(
    family: str, renamed: Callable[[str], str], saved: Saved, tmp_path: Path
) -> None:
    source, reference = saved(family, 1)
    stored = {renamed(key): tensor for key, tensor in load_file(source / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    stages = [load(tmp_path, part) for part in TWO_STAGES]
    assert relative_error(run_schedule(stages, check_model(tmp_path)), reference) < 1e-5


def test_a_tied_model_that_stores_another_head_keeps_it(saved: Saved, tmp_path: Path) -> None:
    """transformers prefers the weights to the configuration."""
    source, _ = saved("llama", 1)
    stored = load_file(source / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    stages = [load(tmp_path, part) for part in TWO_STAGES]
    assert relative_error(run_schedule(stages, check_model(tmp_path)), reference) < 1e-5


def edit(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy a checkpoint, and change its tensors in place."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def dropped(*parts: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change that removes every tensor whose name has all the parts."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if all(part in name for part in parts)]
        assert names
        for name in names:
            del tensors[name]

    return drop


def test_a_missing_tensor_is_fatal_on_its_stage_alone(saved: Saved, tmp_path: Path) -> None:
    source, _ = saved("qwen3", 1)
    lost = "model.layers.3.mlp.up_proj.weight"
    broken = edit(source, tmp_path, dropped(lost))
    with pytest.raises(MissingError, match="layers.3.mlp.up_proj.weight"):
        load(broken, (2, 5))
    load(broken, (0, 2))


def test_a_missing_expert_is_fatal(saved: Saved, tmp_path: Path) -> None:
    source, _ = saved("mixtral", 1)

    with pytest.raises((MissingError, InputError), match=r"layers.3"):
        load(edit(source, tmp_path, dropped(".layers.3.", "experts.2.")), (2, 5))


def test_a_missing_head_and_embedding_are_fatal(saved: Saved, tmp_path: Path) -> None:
    source, _ = saved("llama", 1)
    broken = edit(source, tmp_path, dropped("embed_tokens"))
    for layers in TWO_STAGES:
        with pytest.raises(MissingError, match="embed_tokens|lm_head"):
            load(broken, layers)
    load(broken, (1, 2))


@pytest.mark.parametrize("name", ["model.layers.1.extra.weight", "model.layers.5.extra.weight", "extra.weight"])
def test_a_tensor_without_a_place_is_refused(name: str, saved: Saved, tmp_path: Path) -> None:
    source, _ = saved("qwen3", 1)
    broken = edit(source, tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    owner, other = TWO_STAGES if ".1." in name else TWO_STAGES[::-1]
    with pytest.raises(InputError, match=name):
        load(broken, owner)
    load(broken, other)


def test_a_wrong_shape_is_refused(saved: Saved, tmp_path: Path) -> None:
    source, _ = saved("qwen3", 1)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = edit(source, tmp_path, lambda tensors: tensors.update({name: torch.ones(3, 5)}))
    with pytest.raises(InputError, match="up_proj"):
        load(broken, (0, 2))


@pytest.mark.parametrize("layers, num_layers", [((0, 2), 4), ((0, 6), 5), ((2, 2), 5), ((-1, 2), 5)])
def test_layers_that_the_model_does_not_have_are_refused(
    layers: tuple[int, int], num_layers: int, saved: Saved
) -> None:
    directory, _ = saved("qwen3", 1)
    with pytest.raises(ConfigError, match="has 5 layers, and layers"):
        load_stage(directory, layers, num_layers, torch.float32, CPU, choose_backend("sdpa", CPU, PAGE_SIZE))


PEAK = """
import ctypes, sys
from pathlib import Path
import torch
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model import loader
from sarathi_pp.model.loader import load_stage

loader.fuse = lambda module, compute: 0  # loading alone: what packing leaves to the allocator is not the loader's

def kib(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))

torch.set_num_threads(1)
cpu = torch.device("cpu")
backend = choose_backend("sdpa", cpu, 16)
load_stage(Path(sys.argv[1]), (0, 2), 5, torch.bfloat16, cpu, backend)  # what is imported and kept once
for dtype in (torch.bfloat16, torch.float32):
    ctypes.CDLL(None).malloc_trim(0)
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    stage = load_stage(Path(sys.argv[2]), (4, 8), 8, dtype, cpu, backend)
    print((kib("VmHWM") - before) * 1024, sum(p.nbytes for p in stage.module.parameters()))
    del stage
"""


def peaks_of_loading(tiny: Path, model: Path) -> list[tuple[int, int]]:
    """Return the bytes by which a process grew while it loaded a slice, and those of the slice, in two types.

    Args:
        tiny: directory of a model that is loaded first.
        model: directory of a model of 8 layers.
    """
    script = model / "peak.py"
    script.write_text(PEAK)
    command = [sys.executable, str(script), str(tiny), str(model)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(int(grown), int(held)) for grown, held in lines]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure a peak")
def test_loading_peaks_near_the_slice(saved: Saved, tmp_path: Path) -> None:
    """A float32 checkpoint of 168 MB, of which the slice is half."""
    tiny, _ = saved("llama", 1)
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    # Each of the loader's threads holds one block, or one smaller tensor in both types, while it converts.
    for (grown, held), scratch in zip(peaks_of_loading(tiny, tmp_path), (4 * BLOCK_BYTES, 0), strict=True):
        assert held > 40e6
        assert grown < 1.1 * held + scratch, f"{grown / 1e6:.0f} MB for a slice of {held / 1e6:.0f} MB"


def test_loading_leaves_the_json_of_the_model_alone(saved: Saved) -> None:
    directory, _ = saved("qwen3", 3)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    load(directory, (0, 2))
    assert before == {path.name: path.read_bytes() for path in directory.iterdir()}
    assert len(set(json.loads(before["model.safetensors.index.json"])["weight_map"].values())) >= 3
