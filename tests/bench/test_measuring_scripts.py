"""The scripts that measure policies, without their sweeps: one small run of each variant, and their result tables.

The file also tests what `record.py` says about the commit. The scripts that measure real runs take minutes and do not
run here.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from sarathi_pp.bench.contest import Run, Work
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.core.policy import POLICIES, parse_policy
from sarathi_pp.sim.experiment import Experiment, simulate
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from tests.machine import patient

SCRIPTS = Path(__file__).parents[2] / "examples" / "benchmarks"
# Policies that differ from the whole policy even with 10 requests, all of which find a seat.
DIFFERENT = {
    "no microbatch to spare",
    "always one to spare",
    "256 tokens, whatever the work",
    "512 tokens, whatever the work",
    "decodes shared by count",
}
LINE = {"fixed_ms": 1.0, "a_rank_ms": 0.1, "residual": 0.0}
Load = Callable[[str], ModuleType]
Git = Callable[..., str]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a script by name: examples/benchmarks/ is no package, and its scripts import each other as neighbours."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def git(monkeypatch: pytest.MonkeyPatch) -> Git:
    """Run git in the test's own repository: a hook's git commands would otherwise use the hook's repository."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=none")

    def run(repository: Path, *words: str) -> str:
        command = ["git", "-C", str(repository), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return run


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_each_finds_what_it_takes_from_the_others(load: Load, script: str) -> None:
    load(script)


def test_a_wire_is_not_given_a_rate_and_a_delay_of_which_one_would_be_left_out(load: Load) -> None:
    hosts = load("hosts").Hosts((), "switch", SCRIPTS)
    with pytest.raises(ValueError, match=r"a rate or a delay; given 1e\+09 bits/s and 0.002 s"):
        hosts.shape(bits_per_s=1e9, delay_s=2e-3)


def test_every_variant_of_balanced_runs_and_differs_where_it_must(load: Load) -> None:
    ablation = load("ablate_balanced")
    found = {variant: ablation.measure(variant, "P:D 40", 10) for variant in ablation.VARIANTS}
    figures = {variant: tuple(row[name] for name in ablation.KEPT) for variant, row in found.items()}
    assert all(row["tokens_per_s"] > 0 for row in found.values())
    assert {variant for variant in DIFFERENT if figures[variant] == figures["all of it"]} == set()


def test_the_variant_about_short_seats_differs_where_seats_are_short(load: Load) -> None:
    def issued() -> int:
        workload = parse_workload("uniform:n=24,min=64,max=128,pd=20,seed=1")
        facts = {"policy": parse_policy("balanced"), "chunk_size": 2048, "max_num_seqs": 12}
        return len(simulate(Experiment(profile=preset("gpt3-a100-tp8pp8"), workload=workload, **facts)).issued)

    whole = issued()
    with load("ablate_balanced").VARIANTS["one to spare also where seats are short"]():
        assert issued() > whole
    assert issued() == whole


def test_the_variant_about_a_slow_stage_differs_where_there_is_one(load: Load) -> None:
    ablation = load("ablate_balanced")
    whole, without = (
        ablation.measure(variant, "a slow stage", 60)
        for variant in ("all of it", "one to spare beside a slow stage too")
    )
    assert (whole["tokens_per_s"], whole["steady"]) != (without["tokens_per_s"], without["steady"])


def result(policy: str, size: int, seed: int, tokens_per_s: float, steady: float | None = 0.02) -> dict[str, Any]:
    case = {
        "work": "w",
        "spec": "s",
        "policy": policy,
        "chunk_size": size,
        "seed": seed,
        "jitter_cv": 0.0,
        "slow": False,
    }
    seconds = {"request_bubble_p50_s": 1.0, "ttft_p50_s": 1.0, "ttft_p99_s": 2.0, "itl_p50_s": 0.1, "itl_p99_s": 0.2}
    return {**case, "tokens_per_s": tokens_per_s, "steady": steady, "whole": 0.1, "floor": 0.0, **seconds}


def row_of(table: list[dict[str, Any]], policy: str, kind: str) -> dict[str, Any]:
    [row] = [row for row in table if (row["policy"], row["kind"]) == (policy, kind)]
    return row


def test_the_coordinator_is_timed_over_every_number_of_ranks(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = load("measure_ranks")
    monkeypatch.setattr(ranks, "SEATS_A_STAGE", 4)
    rows = ranks.time_coordinator("balanced", (2, 5), turns=2, steps=3)
    assert [*rows] == [2, 5]
    for row in rows.values():
        assert row["both_ms"] > 0 and row["share_of_a_core"] == pytest.approx(row["both_ms"] / row["stage_ms"])
        assert 1 <= row["decodes_a_microbatch"] <= 20
    line = ranks.fit_line({8: 1.8, 16: 2.6, 32: 4.2})
    assert line == {name: pytest.approx(value, abs=1e-9) for name, value in LINE.items()}
    assert ranks.fit_line({8: 1.0, 16: 3.0, 32: 2.0})["residual"] > 0.1


@pytest.mark.parametrize(
    ("steady", "mean", "most"),
    [((0.01, 0.03), 0.02, 0.03), ((0.01, None), 0.01, 0.01), ((None, 0.03), 0.03, 0.03), ((None, None), None, None)],
)
def test_a_mean_is_over_the_seeds_that_have_the_figure(
    load: Load, steady: tuple[float | None, float | None], mean: float | None, most: float | None
) -> None:
    [row] = load("compare_policies").rows([result("balanced", 2048, seed, 100, steady[seed]) for seed in (0, 1)])
    assert row["steady"] == (None if mean is None else pytest.approx(mean))
    assert row["steady_max"] == most
    assert row["seeds"] == 2


def test_a_tuned_row_is_of_the_best_size_of_each_seed(load: Load) -> None:
    speeds = {(128, 0): 90, (256, 0): 80, (128, 1): 60, (256, 1): 70}
    table = load("compare_policies").rows([result("sarathi", *case, speed) for case, speed in speeds.items()])
    tuned, default = row_of(table, "sarathi", "tuned"), row_of(table, "sarathi", "default")
    assert (tuned["tokens_per_s"], tuned["chunk_sizes"], tuned["seeds"]) == (80, [128, 256], 2)
    assert (default["tokens_per_s"], default["chunk_sizes"], default["seeds"]) == (75, [256], 2)


def test_the_most_that_gllm_takes_is_its_size_and_a_system_s_own_size_has_a_row(load: Load) -> None:
    runs = [result(f"gllm:maxp={size}", 256, 0, speed) for size, speed in ((128, 90), (2048, 80))]
    runs += [result("gllm", 256, 0, 80), result("vllm", 256, 0, 70), result("vllm", 2048, 0, 50)]
    table = load("compare_policies").rows(runs)
    assert row_of(table, "gllm", "tuned")["tokens_per_s"] == 90
    assert row_of(table, "gllm", "default")["chunk_sizes"] == [2048]
    assert row_of(table, "gllm", "tuned")["chunk_sizes"] == [128]
    assert row_of(table, "vllm", "own default")["tokens_per_s"] == 50
    assert [row["kind"] for row in table if row["policy"] == "vllm"] == ["default", "own default"]


def test_a_rival_of_fewer_seeds_is_not_compared_with(load: Load) -> None:
    comparison = load("compare_policies")
    runs = [result("balanced", 2048, seed, 100) for seed in (0, 1)]
    runs += [result("sarathi", size, seed, 80) for size in (128, 256) for seed in (0, 1)]
    alone = result("orca", 256, 0, 200)  # of the first seed only, however fast
    assert comparison.gains(comparison.rows([*runs, alone])) == {"w": pytest.approx(100 / 80)}


def test_a_figure_that_no_seed_has_is_a_dash(load: Load) -> None:
    comparison = load("compare_policies")
    table = comparison.rows([result("balanced", 2048, 0, 1234, None), result("sarathi", 256, 0, 80, 0.0)])
    lines = comparison.markdown(table).splitlines()
    heads, _, ours, theirs = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    ours, theirs = dict(zip(heads, ours, strict=True)), dict(zip(heads, theirs, strict=True))
    assert (ours["chunk size"], ours["seeds"], ours["tokens/s"]) == ("none given", "1", "1,234")
    assert (ours["steady bubble"], theirs["steady bubble"]) == ("-", "0.00%")


def test_the_page_of_policies_is_made_of_the_record(load: Load) -> None:
    folder = SCRIPTS.parents[1] / "docs" / "benchmarks"
    document = json.loads((folder / "results" / "policies-gpt3.json").read_text())
    assert load("compare_policies").page(document) == (folder / "policies-gpt3.md").read_text()


def test_every_work_has_balanced_and_a_rival_of_all_seeds(load: Load) -> None:
    """Otherwise there is nothing to compare, which shows only after hours."""
    comparison = load("compare_policies")
    seeds = range(31, 34)
    cases = [*comparison.offline_cases(10, seeds), *comparison.arrival_cases(10, seeds, 1.0)]
    assert len(set(cases)) == len(cases)
    runs = [result(case.policy, case.chunk_size, case.seed, 1.0) | {"work": case.work} for case in cases]
    table = comparison.rows(runs)
    assert set(comparison.gains(table)) == {case.work for case in cases}
    assert all(row["seeds"] == 3 for row in table if row["policy"] == "balanced")
    assert {row["policy"] for row in table} == set(POLICIES)


def test_rivals_are_taken_from_a_record_and_some_are_run_again(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = load("compare_policies")
    spec = "fixed:n=4,prompt=200,output=3"
    ours, *rivals = (compare.Case("w", spec, policy, 256, seed=0) for policy in ("balanced", "sarathi", "vllm"))
    runs = [{**rival._asdict(), "tokens_per_s": 10.0 + place} for place, rival in enumerate(rivals)]
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"commit": "c0ffee", "capacity_requests_per_s": 3.5, "runs": [*runs, ours._asdict()]}))
    asked: list[Any] = []

    def run_all(cases: list[Any]) -> list[dict[str, Any]]:
        asked.extend(cases)
        return [{**case._asdict(), "tokens_per_s": speed} for case, speed in zip(cases, (10.0, 20.0), strict=True)]

    monkeypatch.setattr(compare, "run_all", run_all)
    known = compare.Known(path)
    assert [found["tokens_per_s"] for found in known.complete([ours, *rivals])] == [20.0, 10.0, 11.0]
    assert asked == [rivals[0], ours]
    assert known.capacity == 3.5 and known.described() == {"rivals from commit": "c0ffee"}
    runs[0]["tokens_per_s"] = 9.0
    path.write_text(json.dumps({"commit": "c0ffee", "runs": runs}))
    with pytest.raises(click.ClickException, match="differs from the record"):
        compare.Known(path).complete([ours, *rivals])


def test_policies_are_compared_with_and_without_the_prefix_cache(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = load("compare_prefix_cache")
    work = comparison.MAIN._replace(policies=("balanced", "vllm"), shared=128, groups=2)
    cases = [
        comparison.Case(work, policy, mode, 10, seed)
        for policy in work.policies
        for mode in comparison.MODES
        for seed in (0, 1)
    ]
    runs = [comparison.run(case) for case in cases]
    runs.append(comparison.run(cases[0]._replace(chunk_size=64)))
    assert runs[-1]["wall_s"] != runs[0]["wall_s"]
    table = comparison.rows([work], runs)
    assert [row["policy"] for row in table] == ["balanced", "vllm"]
    for row, (first, second) in zip(table, (runs[:2], runs[4:6]), strict=True):
        assert row["off"]["wall_s"] == (first["wall_s"] + second["wall_s"]) / 2
        assert row["off"]["hit_rate"] == 0 < row["on"]["hit_rate"] < 1 < row["times_faster"]
    lines = comparison.markdown(table).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert comparison.has_same_schedule("vllm", 8, 0)
    monkeypatch.setattr(comparison, "NOTHING_SHARED", work)
    assert not comparison.has_same_schedule("vllm", 8, 0)
    sizes = [
        {"policy": "vllm", "chunk_size": size, "off": {"wall_s": size / 10, "steady": 0.5}, "on": table[1]["on"]}
        for size in comparison.CHUNK_SIZES
    ]
    _, _, off, on = comparison.markdown_of_sizes(sizes).splitlines()
    assert off.startswith("| vllm | off | 6.4 s, 50.0% | 12.8 s, 50.0% | 25.6 s,") and off.count("|") == on.count("|")
    texts = [event.text for event in simulate(cases[-1].experiment()).issued]
    middle = [MicroBatch.parse(text) for text in texts[len(texts) // 4 : -(len(texts) // 4)]]
    assert comparison.microbatches(cases[-1]) == {
        "policy": "vllm",
        "prefix_cache": "all",
        "decodes": pytest.approx(sum(one.num_decodes for one in middle) / len(middle)),
        "with_prefill": sum(one.num_tokens > one.num_decodes for one in middle) / len(middle),
    }


def test_requests_are_sorted_by_their_groups(load: Load) -> None:
    comparison = load("compare_prefix_cache")
    work = comparison.MAIN._replace(is_sorted=True)
    shuffled, ordered = (comparison.Case(one, "vllm", "all", 40, 0).experiment() for one in (comparison.MAIN, work))
    prompts = [tuple(request.prompt_token_ids) for request in ordered.workload.requests()]
    groups = [prompt[:1024] for prompt in prompts]
    assert [groups.index(group) for group in groups] == [index // 5 * 5 for index in range(40)]
    assert sorted(prompts) == sorted(tuple(request.prompt_token_ids) for request in shuffled.workload.requests())
    assert [request.index for request in ordered.workload.requests()] == list(range(40))


def test_a_record_names_its_commit_command_and_machine(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["/anywhere/measure.py", "--name", "two words"])
    output = tmp_path / "figures" / "found.json"
    document = load("record").Record.begin().write(output, {"speed": 1.5})
    assert json.loads(output.read_text()) == document
    assert list(document) == ["commit", "command", "machine", "speed"]
    assert document["command"] == "python examples/benchmarks/measure.py --name 'two words'"
    assert f"{os.cpu_count()} cores" in document["machine"]


def test_the_commit_of_a_changed_tree_is_marked(
    load: Load, git: Git, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = load("record")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    code, figures = tmp_path / "code.py", tmp_path / "docs" / "benchmarks" / "found.json"
    figures.parent.mkdir(parents=True)
    assert record.describe_commit() == ""
    for path in (code, figures):
        path.write_text("1\n")

    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = git(tmp_path, "rev-parse", "--short", "HEAD").strip()
    assert record.describe_commit() == clean
    figures.write_text("2\n")
    (tmp_path / "untracked").write_text("")
    assert record.describe_commit() == clean
    code.write_text("2\n")
    assert record.describe_commit() == f"{clean}-dirty"


def test_what_keeps_the_cores_awake_yields_to_everything_and_outlives_nobody(load: Load) -> None:
    with load("awake").awake() as loops:
        assert len(loops) == len(os.sched_getaffinity(0))
        for loop in loops:
            wait_until(lambda loop=loop: os.sched_getscheduler(loop) == os.SCHED_IDLE)
            group = Path(f"/proc/{loop}/autogroup")
            if group.exists():  # otherwise sessions do not count, and the policy is enough
                wait_until(lambda group=group: group.read_text().endswith("nice 19\n"))
                assert group.read_text() != Path("/proc/self/autogroup").read_text()
    assert not any(Path(f"/proc/{loop}").exists() for loop in loops)


def test_what_keeps_the_cores_awake_ends_with_who_was_killed(load: Load) -> None:
    code = "import time\nfrom awake import awake\nwith awake() as loops:\n print(*loops, flush=True)\n time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=SCRIPTS, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    loops = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(is_running(int(loop)) for loop in loops))


def is_running(pid: int) -> bool:
    """Check if a process runs; an ended one may stay in the table until its parent reads its exit code."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patient(10)
    while not happened():
        assert time.monotonic() < deadline_s, "not within 10 s"
        time.sleep(0.02)


def test_gpus_are_simulated_at_the_rates_that_were_measured_on_one(load: Load, tmp_path: Path) -> None:
    """Half the rates take twice as long, and the output names work that does not fit."""
    script = load("simulate_gpus")
    machine = {"device": "a GPU", "memory_bytes": 80e9}
    paths = []
    for factor in (1.0, 0.5):
        paths.append(tmp_path / f"{factor}.json")
        profile = {"flops": factor * 593.4e12, "bytes_per_s": factor * 2.68e12, "tile": 128}
        paths[-1].write_text(json.dumps({"machine": machine, "profile": profile}))
    found = []
    for path in paths:
        device, speed, memory_bytes = script.measured(path)
        assert (device, memory_bytes) == ("a GPU", 80e9)
        found.append(script.row("8b", 2, "nvlink", "uniform:n=16,min=256,max=512,pd=8", speed, memory_bytes))
        assert (
            script.row("405b", 4, "nvlink", "uniform:n=16,min=256,max=512,pd=8", speed, memory_bytes)["fits"] is False
        )
    fast, slow = found
    assert fast["layers"][0][1] >= 16, "the last stage has the head"
    assert fast["chunk_size"] in script.CHUNK_SIZES and 0 < fast["bubble_ratio"] < 1
    # Launch and link times do not change.
    assert 0.5 <= slow["tokens_per_s"] / fast["tokens_per_s"] < 0.55


def test_weights_of_llamas(load: Load) -> None:
    shapes = load("simulate_gpus").SHAPES
    billions = {name: shape.weights_bytes(shape.num_layers, 2) / 2e9 for name, shape in shapes.items()}
    assert {name: round(size, 1) for name, size in billions.items()} == {"8b": 8.0, "70b": 70.6, "405b": 405.8}


def test_hosts_of_h100_are_simulated_with_each_policy(load: Load) -> None:
    script = load("simulate_h100")
    profile = script.preset("qwen3.5-397b-h100-tp8pp2")
    row = script.describe("qwen", profile)
    assert sum(row["split"]) == 60 and len(row["kinds"]) == 2
    spec = "uniform:n=16,min=256,max=512,pd=8"
    row["policies"] = [script.simulate_policy(profile, policy, spec) for policy in ("orca", "sarathi")]
    orca, sarathi = row["policies"]
    assert orca["chunk_size"] is None and sarathi["chunk_size"] in script.CHUNK_SIZES
    assert max(sarathi["tokens_per_s_by_chunk_size"].values()) == sarathi["tokens_per_s"] > 0
    assert len(list(script.lines([{**row, "preset": "qwen"}]))) == 4


def test_the_efficiency_of_a_long_prompt_is_that_of_its_speedup(load: Load) -> None:
    script = load("simulate_long_prompts")
    script.HOSTS, script.POLICIES = (2,), ("sarathi", "sglang:dynamic=1", "balanced")
    found = script.simulate_length("expanded", 65_536)
    alone, (fixed, shrinking, balanced) = found["one_host"], found["rows"]
    assert alone["bubble_ratio"] == pytest.approx(0, abs=1e-3)
    for row in (fixed, shrinking, balanced):
        assert row["efficiency"] == pytest.approx(alone["wall_s"] / row["wall_s"] / 2)
        assert 0.8 < row["efficiency"] < 1
        assert row["wall_s"] == min(row["wall_s_by_chunk_size"].values())
    assert fixed["smallest_chunk"] == fixed["largest_chunk"] == fixed["chunk_size"]
    assert shrinking["smallest_chunk"] < 0.9 * shrinking["largest_chunk"]
    slow = script.best_of("absorbed", 1, "sarathi", 65_536)
    assert slow["wall_s"] > 1.5 * alone["wall_s"]
    assert len(list(script.lines([found]))) == 2 + 4


def run_of(commit: str, number: int, speed: float, token_ids: list[list[int]], stolen: float = 0.0) -> Run:
    report = {
        "total_tokens_per_s": speed,
        "bubble_ratio": 0.1,
        "bubble_ratio_steady": 0.05,
        "per_stage": [{"compute_s": 1.0}, {"compute_s": 2.0}],
        "causes": {"host_s": 0.1},
    }
    return Run(commit, number, report, token_ids, busy_before=0.0, stolen=stolen, peak_bytes=0, command_s=1.0)


def test_a_commit_is_compared_with_the_one_before_it_in_the_same_round(load: Load) -> None:
    other = [[1], [9]]
    # The second round runs in reverse order, on a machine half as fast.
    runs = [run_of("a", 0, 100.0, [[1], [2]]), run_of("b", 0, 110.0, [[1], [2]]), run_of("c", 0, 99.0, other)]
    runs += [run_of("c", 1, 54.0, other), run_of("b", 1, 60.0, [[1], [2]]), run_of("a", 1, 50.0, [[1], [2]])]
    first, second, third = load("measure_commits").compare(("a", "b", "c"), runs)
    assert first["commit"] == "a" and "tokens/s, of the one before" not in first
    assert first["tokens/s"] == {"median": 75.0, "min": 50.0, "max": 100.0}
    assert first["compute, s"]["median"] == 3.0
    assert second["tokens/s, of the one before"]["min"] == pytest.approx(1.1)
    assert second["tokens/s, of the one before"]["max"] == pytest.approx(1.2)
    assert third["tokens/s, of the one before"]["median"] == pytest.approx(0.9)
    assert [one["tokens/s"] for one in third["rounds"]] == [99.0, 54.0]
    assert (second["same tokens as the one before"]["min"], third["same tokens as the one before"]["max"]) == (1.0, 0.5)


def rounds_of(*stolen: float) -> list[Run]:
    """Return runs of `a` and `b`, in which the host took the given share from every second entrant to run."""
    runs = []
    for number, share in enumerate(stolen):
        first, second = ("b", "a") if number % 2 else ("a", "b")
        runs += [run_of(first, number, 100.0 + number, [[1]]), run_of(second, number, 100.0, [[1]], share)]
    return runs


@pytest.mark.parametrize(
    ("stolen", "made", "undisturbed"),
    [
        ([0.0, 0.02, 0.0], 2, 2),  # exactly the limit is allowed
        ([0.0, 0.09, 0.021, 0.01, 0.0], 4, 2),
        ([0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0], 6, 1),
        ([0.5] * 8, 6, 0),
    ],
)
def test_a_disturbed_round_is_replaced_by_another_one(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stolen: list[float], made: int, undisturbed: int
) -> None:
    rounds = load("rounds")
    limits: list[int] = []

    def hold(work: Work, entrants: tuple[str, ...], most: int) -> Iterator[Run]:
        limits.append(most)
        yield from rounds_of(*stolen[:most])

    monkeypatch.setattr(rounds, "hold", hold)
    work = Work(tmp_path, "bfloat16", (), 1, tmp_path)
    runs = list(rounds.hold_undisturbed(work, ("a", "b"), 2))
    assert limits == [6]
    assert [run.round for run in runs] == [number for number in range(made) for _ in "ab"]
    described = rounds.describe_rounds(runs, 2)
    assert described == {"rounds": made, "undisturbed rounds": undisturbed, "wanted rounds": 2, "most stolen": 0.02}
    missing = rounds.missing_rounds(runs, 2)
    if undisturbed == 2:
        assert missing is None
    else:
        assert f"Only {undisturbed} of 2 wanted rounds" in missing
        assert f"In {made - undisturbed} other rounds, the host took more than 2%" in missing


def test_figures_of_a_disturbed_round_are_kept_but_do_not_count(load: Load) -> None:
    runs = rounds_of(0.0, 0.5, 0.01)
    first, second = load("measure_commits").compare(("a", "b"), runs)
    assert [row["disturbed"] for row in second["rounds"]] == [False, True, False]
    assert [row["tokens/s"] for row in second["rounds"]] == [100.0, 101.0, 100.0]
    assert first["tokens/s"] == {"median": 101.0, "min": 100.0, "max": 102.0}
    assert second["tokens/s"] == {"median": 100.0, "min": 100.0, "max": 100.0}
    assert second["tokens/s, of the one before"]["min"] == pytest.approx(100 / 102)
    assert second["tokens/s, of the one before"]["max"] == 1.0
    nothing = load("measure_commits").compare(("a", "b"), rounds_of(0.5))
    assert [set(row) for row in nothing] == [{"commit", "rounds"}] * 2

    choice = load("measure_option").Option("head", {"a": (), "b": ()})
    runs = [replace(run, entrant=choice.label("orca", run.entrant)) for run in runs]
    found = choice.compare(("orca",), runs)
    assert found["orca, a over b"] == {"median": pytest.approx(1.01), "min": 1.0, "max": pytest.approx(1.02)}
    assert found["stolen"]["max"] == 0.01
    assert [one["disturbed"] for one in found["each round"]] == [False, True, False]
    assert found["each round"][1]["orca, head a"]["stolen"] == 0.5
    assert set(choice.compare(("orca",), runs[2:4])) == {"same tokens", "each round"}


def test_a_commit_s_own_code_runs_and_none_that_is_not_there(
    load: Load, git: Git, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commits = load("measure_commits")
    repository = tmp_path / "repository"
    (repository / "sarathi_pp").mkdir(parents=True)
    (repository / "kernels" / "sarathi_pp_kernels").mkdir(parents=True)
    kernels = repository / "kernels" / "sarathi_pp_kernels" / "__init__.py"
    for module in (repository / "sarathi_pp" / "__init__.py", kernels):
        module.write_text("AGE = 'old'\n")
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    commit = git(repository, "rev-parse", "--short", "HEAD").strip()
    for module in (repository / "sarathi_pp" / "__init__.py", kernels):
        module.write_text("AGE = 'new'\n")
    monkeypatch.setattr(commits, "ROOT", repository)
    run = commits.CommitRun.lay_out(commit, (), tmp_path)
    assert (run.tree / "sarathi_pp" / "__init__.py").read_text() == "AGE = 'old'\n"
    # As a contest runs it.
    work = Work(tmp_path, "bfloat16", (), 1, tmp_path)
    command = [sys.executable, "-P", "-c", "import sarathi_pp as a, sarathi_pp_kernels as b; print(a.AGE, b.AGE)"]
    environment = {**os.environ, **run.environment(work)}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "old old\n"
    assert str(run.tree) in " ".join(run.command(work))
    assert commits.resolve("HEAD") == {"commit": commit, "subject": "first"}
    with pytest.raises(click.ClickException, match="--commit c0ffee0"):
        commits.resolve("c0ffee0")
    with pytest.raises(click.UsageError, match=f"two or more different commits; got {commit}, HEAD"):
        commits.main.callback(tmp_path, (commit, "HEAD"), "", "balanced", 1, None)
    git(repository, "mv", "sarathi_pp", "elsewhere")
    git(repository, "commit", "-qm", "moved")
    with pytest.raises(click.ClickException, match="cannot extract HEAD"):
        commits.CommitRun.lay_out("HEAD", (), tmp_path)
    # For the case that PYTHONPATH does not come first.
    monkeypatch.setattr(commits, "inherited", lambda additions: dict(os.environ))
    with pytest.raises(click.ClickException, match=r"would run .*, not the code in"):
        commits.CommitRun.lay_out(commit, (), tmp_path)
