"""A plan follows from a model's files and a profile; nothing runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sarathi_pp.cli.main import main
from sarathi_pp.cli.plan import render_plan
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.sizing import saturation
from sarathi_pp.errors import ConfigError, MissingError, PartitionError
from sarathi_pp.model.loader import stage_bytes
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.sim.workload import Workload, parse_workload
from sarathi_pp.tuning.hardware import CONTEXT_BYTES, Hardware
from sarathi_pp.tuning.plan import make_plan
from sarathi_pp.tuning.prediction import Prediction, predict
from tests.checkpoint.quantised import FORMS, publish, write_published
from tests.model.families import FAMILIES, write_checkpoint

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")  # 5 layers, hidden size 64, 1152 positions
CONFIGS = Path(__file__).parent / "configs"
# A page of one of its layers: keys and values of 16 tokens, 2 heads of 16 channels, in float32.
PAGE_BYTES = 2 * 16 * 2 * 16 * 4
# 20 decodes per microbatch: 40 requests, 2 in flight.
WORKLOAD = "fixed:n=40,prompt=330,output=34"

PROFILE = Profile(
    model="tiny-adder",
    device="cpu",
    dtype="float32",
    hidden_size=64,
    num_layers=5,
    cost=CostModel(
        64,
        (
            StageCost((0, 3), 1e-3, 64e-4, 1e-8, 1e-7, 1e-5, page_bytes=3 * PAGE_BYTES),
            StageCost((3, 5), 1e-3, 64e-4, 1e-8, 1e-7, 1e-5, head_s=1e-5, page_bytes=2 * PAGE_BYTES),
        ),
    ),
    link_latency_s=1e-4,
    link_bytes_per_s=1e9,
    jitter_cv=0.01,
    pages=2000,
    max_num_seqs=128,
)


def plan(tmp_path: Path, profile: Profile | None = PROFILE, workload: str = WORKLOAD, **options: Any) -> dict[str, Any]:
    fields = {"model": ADDER, "stages": 2} | options
    if profile is not None:
        fields["profile"] = tmp_path / "profile.json"
        fields["profile"].write_text(json.dumps(profile.to_json()))
    return make_plan(RunConfig(**fields), parse_workload(workload))


def with_stages(tile: int, **changed: float) -> Profile:
    """Return the same profile with other coefficients on both stages, given for each token."""
    stages = [replace(stage, a1=1e-4 * tile, **changed) for stage in PROFILE.cost.stages]
    return replace(PROFILE, cost=CostModel(tile, tuple(stages)))


@pytest.mark.parametrize(("output", "chunk_size"), [(34, 220), (67, 120), (12, 620)])
def test_the_chunk_size_is_saraths_optimum(output: int, chunk_size: int, tmp_path: Path) -> None:
    """There are 20 decodes, and 10, 5 or 30 prompt tokens for each."""
    found = plan(tmp_path, with_stages(1), workload=f"fixed:n=40,prompt=330,output={output}")
    assert found["chunk_size"] == chunk_size and found["tile"] == 1


def compared_by(monkeypatch: pytest.MonkeyPatch, predict: Callable[..., Prediction]) -> dict[int, Prediction]:
    """Return the predictions that a plan will compare, by chunk size."""
    seen = {}

    def predicting(profile: Profile, workload: Workload, run: ResolvedRun) -> Prediction:
        seen[run.chunk_size] = predict(profile, workload, run)
        return seen[run.chunk_size]

    monkeypatch.setattr("sarathi_pp.tuning.planner.predict", predicting)
    return seen


@pytest.mark.parametrize(
    ("requests", "output", "sizes"),
    [(200, 50, [320, 384]), (40, 34, [192, 256])],  # optima: 45 requests fit, 45 * (1 + 330 / 49) = 348; 20 * 11 = 220
)
def test_of_the_two_tile_counts_around_the_optimum_the_faster_one_is_taken(
    requests: int, output: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = compared_by(monkeypatch, predict)
    work = f"fixed:n={requests},prompt=330,output={output}"
    found = plan(tmp_path, with_stages(64, a0=2e-3), workload=work, policy="sarathi")
    assert sorted(compared) == sizes
    rates = {size: prediction.total_tokens_per_s for size, prediction in compared.items()}
    assert len({*rates.values()}) == 2
    assert found["chunk_size"] == max(rates, key=rates.__getitem__)
    assert found["total_tokens_per_s"] == max(rates.values())


@pytest.mark.parametrize("faster", [192, 256])
def test_either_of_the_two_may_be_the_faster(faster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared_by(monkeypatch, lambda profile, workload, run: Prediction(1.0, 0.0, 1, float(run.chunk_size == faster)))
    found = plan(tmp_path, with_stages(64, a0=2e-3), policy="sarathi")
    assert found["chunk_size"] == faster and found["total_tokens_per_s"] == 1.0


def test_it_is_never_below_saturation(tmp_path: Path) -> None:
    fixed = [replace(stage, a0=50e-3) for stage in PROFILE.cost.stages]
    slow_start = replace(PROFILE, cost=CostModel(64, tuple(fixed)))
    found = plan(tmp_path, slow_start, workload="fixed:n=4,prompt=100,output=60")
    assert found["chunk_size"] == found["saturation_tokens"] == saturation(slow_start.cost) > 500


def test_layers_leave_a_stage_whose_head_is_heavy(tmp_path: Path) -> None:
    first, last = PROFILE.cost.stages
    even = [replace(first, a0=3e-3, a1=3 * 64e-5), replace(last, a0=2e-3, a1=2 * 64e-5)]
    alike = replace(PROFILE, cost=CostModel(64, tuple(even)))
    assert plan(tmp_path, alike)["layer_split"] == [3, 2]
    heavy = replace(PROFILE, cost=CostModel(64, (even[0], replace(even[1], a0=9e-3, head_s=5e-4))))
    found = plan(tmp_path, heavy)
    assert found["layer_split"] == [4, 1]
    assert [stage["layers"] for stage in found["per_stage"]] == [[0, 4], [4, 5]]
    assert max(stage["microbatch_s"] for stage in found["per_stage"]) < max(
        stage["microbatch_s"] for stage in plan(tmp_path, heavy, layer_split=(3, 2))["per_stage"]
    )


def test_pages_and_memory_of_each_stage(tmp_path: Path) -> None:
    """Each stage may have the KV cache of the profile's larger stage. A run has the fewest pages of all stages."""
    found = plan(tmp_path, layer_split=(4, 1))
    budget = 2000 * 3 * PAGE_BYTES
    assert [stage["pages"] for stage in found["per_stage"]] == [budget // (4 * PAGE_BYTES), budget // PAGE_BYTES]
    assert found["pages"] == 1500
    assert [stage["kv_bytes"] for stage in found["per_stage"]] == [1500 * 4 * PAGE_BYTES, 1500 * PAGE_BYTES]
    given = plan(tmp_path, layer_split=(4, 1), kv_cache_memory_bytes=400 * PAGE_BYTES)
    assert [stage["pages"] for stage in given["per_stage"]] == [100, 400] and given["pages"] == 100
    assert plan(tmp_path, max_num_seqs=2)["pages"] == 2 * 1152 // 16


def test_weights_of_the_stages_are_those_of_the_file(tmp_path: Path) -> None:
    stored = (Path(ADDER) / "model.safetensors").stat().st_size
    for split in ((3, 2), (1, 4)):
        found = plan(tmp_path, layer_split=split)
        weights = [stage["weights_bytes"] for stage in found["per_stage"]]
        assert 0.98 * stored < sum(weights) < stored  # the remainder is the file's header
        assert weights[0] / weights[1] == pytest.approx(split[0] / split[1], rel=0.1)
    half = plan(tmp_path, layer_split=(3, 2), dtype="bfloat16")
    assert [stage["weights_bytes"] * 2 for stage in half["per_stage"]] == [
        stage["weights_bytes"] for stage in plan(tmp_path, layer_split=(3, 2))["per_stage"]
    ]
    assert half["notes"] == [
        f"--profile {tmp_path / 'profile.json'} was measured in float32, and this run is in bfloat16"
    ]


def test_pages_in_float8_hold_four_times_the_tokens_of_float32(tmp_path: Path) -> None:
    given = {"layer_split": (4, 1), "kv_cache_memory_bytes": 400 * PAGE_BYTES}
    plain, float8 = plan(tmp_path, None, **given), plan(tmp_path, None, **given, kv_cache_dtype="fp8")
    assert [stage["pages"] for stage in plain["per_stage"]] == [100, 400]
    assert [stage["pages"] for stage in float8["per_stage"]] == [400, 1600]
    assert [stage["kv_bytes"] for stage in float8["per_stage"]] == [400 * PAGE_BYTES, 100 * PAGE_BYTES]
    assert (plain["kv_cache_dtype"], float8["kv_cache_dtype"]) == ("float32", "fp8")
    assert "--kv-cache-dtype fp8" in " ".join(float8["options"]) and "--kv-cache-dtype" not in plain["options"]


def test_a_first_stage_that_computes_heads_holds_their_weights_too(tmp_path: Path) -> None:
    moved, kept = (plan(tmp_path, layer_split=(3, 2), head=head)["per_stage"] for head in ("auto", "last"))
    vocabulary, hidden_size = 16, 64
    assert moved[0]["weights_bytes"] - kept[0]["weights_bytes"] == 4 * vocabulary * hidden_size
    assert moved[1]["weights_bytes"] == kept[1]["weights_bytes"]


def test_of_a_stage_that_two_ranks_hold_memory_is_one_rank_s(tmp_path: Path) -> None:
    """A rank has half of each layer's products and of the KV heads; embedding, norms and head are whole."""
    split = {"layer_split": (3, 2), "kv_cache_memory_bytes": 400 * PAGE_BYTES, "head": "last"}
    whole, half = plan(tmp_path, None, **split), plan(tmp_path, None, **split, tensor_parallel_size=2)
    assert (whole["tensor_parallel_size"], half["tensor_parallel_size"]) == (1, 2)
    for one, other in zip(whole["per_stage"], half["per_stage"], strict=True):
        layers = one["layers"][1] - one["layers"][0]
        products = 4 * layers * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 192)
        assert one["weights_bytes"] - other["weights_bytes"] == products // 2
        assert other["pages"] in (2 * one["pages"], 2 * one["pages"] + 1)
    assert half["pages"] > whole["pages"] and half["per_stage"][0]["kv_bytes"] <= 400 * PAGE_BYTES
    # The model is small and gloo slow: sums take more time than sharding saves.
    assert half["total_tokens_per_s"] < whole["total_tokens_per_s"]


def test_a_profile_of_other_shards_is_noted_and_one_of_the_same_is_not(tmp_path: Path) -> None:
    (note,) = plan(tmp_path, tensor_parallel_size=2)["notes"]
    assert note.endswith("was measured with --tensor-parallel-size 1, and this run has 2")
    found = plan(tmp_path, replace(PROFILE, tensor_parallel_size=2), tensor_parallel_size=2)
    assert found["notes"] == []
    file = StringIO()
    Console(file=file, width=80).print(render_plan(found))
    assert "2 ranks hold each stage together; the table shows the memory of one rank" in file.getvalue()


def test_a_jittery_machine_gets_one_microbatch_more(tmp_path: Path) -> None:
    jittery = replace(PROFILE, jitter_cv=0.1)
    assert plan(tmp_path, policy="sarathi", stages=3)["inflight"] == 3
    assert plan(tmp_path, jittery, policy="sarathi", stages=3)["inflight"] == 4
    assert plan(tmp_path, jittery, policy="sarathi")["inflight"] == 2  # not with two stages
    assert plan(tmp_path)["inflight"] == 3  # balanced uses it if it helps
    assert plan(tmp_path, jittery, inflight=2)["inflight"] == 2


def test_without_a_profile_times_are_estimated(tmp_path: Path) -> None:
    found = plan(tmp_path, None, kv_cache_memory_bytes=1 << 20, device="cpu")
    assert found["source"] == "estimate" and found["notes"] == []
    assert found["layer_split"] == [3, 2] and found["per_stage"][0]["pages"] == (1 << 20) // (3 * PAGE_BYTES)
    assert found["total_tokens_per_s"] > 0 and 0 <= found["bubble_ratio"] < 1


def test_other_stage_counts_than_the_profiles(tmp_path: Path) -> None:
    found = plan(tmp_path, stages=4)
    assert sorted(found["layer_split"]) == [1, 1, 1, 2] and found["inflight"] == 5
    assert plan(tmp_path, stages=1)["layer_split"] == [5]


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="more than the model's 5 layers"):
        plan(tmp_path, stages=6)
    with pytest.raises(ConfigError, match="requests of up to 1600 tokens.*takes 1152"):
        plan(tmp_path, workload="fixed:n=4,prompt=1500,output=100")
    with pytest.raises(ConfigError, match="this model has 5 layers and hidden size 64"):
        plan(tmp_path, replace(PROFILE, model="other", hidden_size=32))
    with pytest.raises(ConfigError, match="tensor-parallel-size is 3; the model has 2 KV heads"):
        plan(tmp_path, tensor_parallel_size=3)
    assert plan(tmp_path, kv_cache_memory_bytes=100)["verdict"].startswith("does not fit: the KV cache lacks")
    with pytest.raises(ConfigError, match="--device cpu: --card and --device-memory describe GPUs"):
        make_plan(RunConfig(model=ADDER, device="cpu"), parse_workload(WORKLOAD), Hardware(cards=("l4",)))
    with pytest.raises(MissingError, match="cannot read the profile"):
        make_plan(RunConfig(model=ADDER, profile=tmp_path / "none.json"), parse_workload(WORKLOAD))


def rendered(document: dict[str, Any]) -> list[str]:
    file = StringIO()
    Console(file=file, width=80).print(render_plan(document), crop=False)
    return file.getvalue().splitlines()


def test_the_devices_and_then_the_verdict_come_first_and_then_what_to_give_generate(tmp_path: Path) -> None:
    found = plan(tmp_path) | {"model": "tiny-adder"}
    subject, verdict, options, *lines = rendered(found)
    assert subject == "tiny-adder in 2 stages on the device of the profile (cpu)"
    assert verdict.startswith("fits")
    assert (
        options.removeprefix("options to use: ").split()
        == found["options"]
        == [
            *("--stages", "2", "--layer-split", ",".join(map(str, found["layer_split"]))),
            *("--chunk-size", str(found["chunk_size"]), "--inflight", "3", "--max-num-seqs", "128"),
        ]
    )
    assert any(line.split()[:2] == ["0", f"0-{found['layer_split'][0] - 1}"] for line in lines)
    assert max(map(len, lines)) <= 80


# Published config.json files, with the number of parameters of the published weights.
LARGE = {"llama-3.1-405b": 405_853_388_800, "qwen3-235b-a22b": 235_093_634_560, "gpt-oss-120b": 116_829_156_672}
SMALL_WORKLOAD = "fixed:n=8,prompt=64,output=8"


def plan_large(name: str, hardware: Hardware, **options: Any) -> dict[str, Any]:
    config = RunConfig(model=str(CONFIGS / name / "config.json"), **options)
    return make_plan(config, parse_workload(SMALL_WORKLOAD), hardware, use_all_devices=True)


@pytest.mark.parametrize(
    ("name", "gib", "fits"),
    [
        ("llama-3.1-405b", 80, True),
        ("qwen3-235b-a22b", 24, False),
        ("gpt-oss-120b", 24, True),
        pytest.param("llama-3.1-405b", 24, False, marks=pytest.mark.full),
        pytest.param("qwen3-235b-a22b", 80, True, marks=pytest.mark.full),
        pytest.param("gpt-oss-120b", 80, True, marks=pytest.mark.full),
    ],
)
def test_a_large_model_is_planned_from_its_config_alone(name: str, gib: int, fits: bool) -> None:
    found = plan_large(name, Hardware(hosts=2, devices=8, memory=(gib << 30,)))
    stages = found["per_stage"]
    assert found["fits"] is fits and found["stages"] == len(stages) == 16
    assert sum(stage["weights_bytes"] for stage in stages) == 2 * LARGE[name]
    usable = 0.9 * (gib << 30) - (512 << 20)
    for stage in stages:
        assert stage["total_bytes"] == stage["weights_bytes"] + stage["working_bytes"] + stage["kv_bytes"]
        assert stage["room_bytes"] == pytest.approx(usable, abs=1)
        assert fits is False or stage["free_bytes"] >= 0
        assert 0.01 < stage["working_bytes"] / 2**30 < 4
    assert ("MXFP4" in found["notes"][0]) is (name == "gpt-oss-120b")


def test_experts_in_mxfp4_are_planned_as_they_are_stored_from_the_config_alone() -> None:
    """gpt-oss-120b fits one H200 so. 36 layers have 128 experts of 3 matrices of 2,880 x 2,880."""
    found = plan_large("gpt-oss-120b", Hardware(cards=("h200",)), weights="stored")
    of_layer = 128 * 3 * 2880**2
    codes = 36 * of_layer * 17 // 32
    expected = 2 * (LARGE["gpt-oss-120b"] - 36 * of_layer) + codes + 2 * of_layer
    assert found["fits"] and [stage["weights_bytes"] for stage in found["per_stage"]] == [expected]
    assert not any("which of the weights" in note for note in found["notes"])


def test_cards_of_several_kinds_get_layers_by_time_within_their_memory() -> None:
    cards = ("h200", "h100-80g", "a100-40g", "rtx-4090", "rtx-4090")
    found = plan_large("gpt-oss-120b", Hardware(cards=cards))
    assert found["fits"] and found["layer_split"] == sorted(found["layer_split"], reverse=True)
    assert all(stage["free_bytes"] >= 0 for stage in found["per_stage"])
    times = [stage["microbatch_s"] for stage in found["per_stage"]]
    assert max(times) < 1.5 * min(times)


def test_a_stage_that_two_devices_hold_has_the_memory_of_one() -> None:
    whole = plan_large("qwen3-235b-a22b", Hardware(devices=8, memory=(80 << 30,)))
    half = plan_large("qwen3-235b-a22b", Hardware(devices=16, memory=(80 << 30,)), tensor_parallel_size=2)
    assert (whole["stages"], half["stages"]) == (8, 8)
    assert half["per_stage"][3]["weights_bytes"] < 0.55 * whole["per_stage"][3]["weights_bytes"]


def test_more_devices_than_layers_or_than_stages_are_noted() -> None:
    found = make_plan(RunConfig(model=ADDER, stages=2), parse_workload(SMALL_WORKLOAD), Hardware(cards=("l4",) * 3))
    assert found["stages"] == 2 and "2 of 3 devices are used" in found["notes"]
    with pytest.raises(ConfigError, match="need 4 devices, and 3 are described"):
        make_plan(RunConfig(model=ADDER, stages=4), parse_workload(SMALL_WORKLOAD), Hardware(cards=("l4",) * 3))


def test_a_profile_without_page_sizes_has_pages_of_its_own_type(tmp_path: Path) -> None:
    """It has 2000 pages. In float32, one takes the memory of four in FP8."""
    sizeless = with_stages(64, page_bytes=0)
    pages = [
        plan(tmp_path, replace(sizeless, kv_cache_dtype=kind), SMALL_WORKLOAD, kv_cache_dtype=own)["pages"]
        for kind in ("auto", "fp8")
        for own in ("auto", "fp8")
    ]
    assert pages == [2000, 8000, 500, 2000]


def test_times_of_a_profile_and_memory_of_cards(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(PROFILE.to_json()))
    config = RunConfig(model=ADDER, stages=2, profile=profile)
    found = make_plan(config, parse_workload(SMALL_WORKLOAD), Hardware(cards=("l4", "l4")))
    assert found["source"] == "profile" and found["per_stage"][0]["room_bytes"] > 19 << 30


def test_the_command_ends_with_2_if_the_model_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(CONFIGS / "gpt-oss-120b")
    with pytest.raises(SystemExit) as left:
        main(["plan", "--model", model, "--device-memory", "24GiB,24GiB", "--workload", SMALL_WORKLOAD, "--json"])
    said = capsys.readouterr()
    assert left.value.code == 2
    found = json.loads(said.out)
    assert found["stages"] == 2 and f"CapacityError: {found['verdict']}\n" in said.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profile", "profile.json", "--gpu-memory-utilization", "0.5"), "--profile sets the number of KV pages"),
        (("--attention", "sdpa"), "--attention"),
        (("--workload", "zips:n=3"), "'zips:n=3' is not known"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    options: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--model", ADDER, *options])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_the_devices_of_the_verdict_are_named() -> None:
    def subject(hardware: Hardware) -> str:
        return rendered(plan_large("gpt-oss-120b", hardware) | {"model": "gpt-oss"})[0]

    equal = Hardware(hosts=2, devices=8, cards=("h100-80g",))
    assert subject(equal) == "gpt-oss in 16 stages on 2 hosts, together 16 x H100 80 GB"
    mixed = Hardware(memory=(80 << 30, 80 << 30, 24 << 30))
    assert subject(mixed) == "gpt-oss in 3 stages on 2 x GPU with 80 GiB, 1 x GPU with 24 GiB"


def test_a_quantised_model_is_planned_with_the_memory_of_its_floats(tmp_path: Path) -> None:
    found = write_published("llama", "fp8 blocks", tmp_path)
    document, whole = (
        make_plan(RunConfig(model=str(model), stages=2), parse_workload(SMALL_WORKLOAD))
        for model in (found.quantised, found.reference)
    )
    assert (document["quantised"], whole["quantised"]) == ("FP8, blocks of 32 x 32", None)
    for ours, theirs in zip(document["per_stage"], whole["per_stage"], strict=True):
        assert ours["weights_bytes"] == theirs["weights_bytes"] >= theirs["stored_bytes"]  # some hold a second LM head
        assert 0.25 < ours["stored_bytes"] / theirs["stored_bytes"] < 0.9
    assert any(line.startswith("GiB that each stage reads from its files (FP8") for line in rendered(document))
    assert not any("reads from its files" in line for line in rendered(whole))


@pytest.mark.parametrize(
    ("workload", "seats", "noted"),
    [
        ("fixed:n=64,prompt=330,output=34,shared=304", 4, "--max-num-seqs 8"),
        ("fixed:n=64,prompt=330,output=34", 4, None),
        ("fixed:n=4,prompt=330,output=34,shared=304", 4, None),
    ],
)
def test_requests_that_share_pages_get_more_seats(tmp_path: Path, workload: str, seats: int, noted: str | None) -> None:
    notes = plan(tmp_path, workload=workload, max_num_seqs=seats)["notes"]
    assert (len(notes) == 1 and noted in notes[0]) if noted else notes == []


# Six layers with wide MLPs. Then come experts, of which a token uses a small part.
UNEQUAL = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 4096,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}


def test_unequal_layers_are_split_by_time_and_their_kinds_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(UNEQUAL))
    found = plan(tmp_path, None, model=str(tmp_path), device="cpu", kv_cache_memory_bytes=64 << 20)
    kinds = [stage["layer_kinds"] for stage in found["per_stage"]]
    first, last = found["layer_split"]
    assert first < 6 < last
    assert kinds == [
        f"{first} latent attention with an MLP",
        f"{6 - first} latent attention with an MLP, 6 latent attention with experts",
    ]
    file = StringIO()
    Console(file=file, width=120).print(render_plan(found))
    assert f"stage 0: {kinds[0]}\n  stage 1: {kinds[1]}\n" in file.getvalue()
    even = plan(tmp_path, None, model=str(tmp_path), layer_split="even", device="cpu", kv_cache_memory_bytes=64 << 20)
    slowest = [max(stage["microbatch_s"] for stage in one["per_stage"]) for one in (found, even)]
    assert slowest[0] < 0.9 * slowest[1]


def test_equal_layers_have_no_kinds(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert [stage["layer_kinds"] for stage in found["per_stage"]] == [None, None]
    file = StringIO()
    Console(file=file, width=120).print(render_plan(found))
    assert "layers differ" not in file.getvalue()


def plan_float8(model: Path, memory_bytes: int, **options: Any) -> dict[str, Any]:
    fields = {"model": str(model), "stages": 2, "dtype": "bfloat16", "max_num_seqs": 2} | options
    hardware = Hardware(memory=(memory_bytes,), devices=2)
    return make_plan(RunConfig(**fields), parse_workload(SMALL_WORKLOAD), hardware)


@pytest.mark.parametrize(
    ("family", "form"), [("llama", "fp8 blocks"), ("qwen3_moe", "fp8 blocks"), ("gpt_oss", "mxfp4")]
)
def test_coded_weights_are_counted_with_the_memory_to_expand_them(family: str, form: str, tmp_path: Path) -> None:
    directory = write_published(family, form, tmp_path).quantised
    document, whole = (plan_float8(directory, 8 << 30, weights=weights) for weights in ("stored", "dtype"))
    assert (document["weights"], whole["weights"]) == ("stored", "dtype") and document["fits"]
    assert "--weights" in document["options"] and "--weights" not in whole["options"]
    held = HeldTypes.on("cuda", torch.bfloat16, coded=True)
    for ours, theirs in zip(document["per_stage"], whole["per_stage"], strict=True):
        assert ours["weights_bytes"] == stage_bytes(directory, tuple(ours["layers"]), held) < theirs["weights_bytes"]
    assert any("more than 16 rows expand them to bfloat16" in note for note in document["notes"])
    assert document["total_tokens_per_s"] < whole["total_tokens_per_s"], "more bytes are moved"


def test_a_plan_that_does_not_fit_names_the_option_that_keeps_weights_in_fp8(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.update({"hidden_size": 256, "intermediate_size": 1024})
    write_checkpoint("llama", tmp_path / "source", config=config)
    publish(FORMS["fp8 blocks"], tmp_path / "source", tmp_path / "quantised", tmp_path / "reference")
    directory, given = tmp_path / "quantised", {"kv_cache_memory_bytes": 1 << 18}
    least = []
    for weights in ("stored", "dtype"):
        stages = plan_float8(directory, CONTEXT_BYTES + (1 << 20), weights=weights, **given)["per_stage"]
        least.append(max(stage["total_bytes"] for stage in stages))  # with the smallest microbatches
    assert least[0] < least[1]
    memory = CONTEXT_BYTES + sum(least) // 2
    refused = plan_float8(directory, memory, **given)
    assert not refused["fits"]
    assert ["--weights", "stored"] in [list(remedy["options"]) for remedy in refused["would_fit"]]
    assert plan_float8(directory, memory, weights="stored", **given)["fits"]


def test_neighbours_with_equal_kinds_of_layers_share_a_line(tmp_path: Path) -> None:
    found = plan(tmp_path)
    kinds = ["4 linear", "3 linear, 1 attention", "3 linear, 1 attention", "4 linear", None]
    stages = [found["per_stage"][0] | {"stage": stage, "layer_kinds": each} for stage, each in enumerate(kinds)]
    lines = rendered(found | {"per_stage": stages})
    start = next(number for number, line in enumerate(lines) if "differ" in line)
    assert lines[start + 1 : start + 4] == [
        "  stage 0: 4 linear", "  stages 1 to 2: 3 linear, 1 attention each", "  stage 3: 4 linear"
    ]  # fmt: skip
    assert not lines[start + 4].startswith("  stage")
