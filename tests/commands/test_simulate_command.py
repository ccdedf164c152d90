"""`simulate` with a prefix cache."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from sarathi_pp.cli.main import cli
from sarathi_pp.cli.simulate import prefix_cache_lines
from sarathi_pp.errors import ConfigError

PLAIN = "uniform:n=24,min=600,max=700,output=8,output_max=16,seed=2"
SHARED = f"{PLAIN},shared=512,groups=3"


def simulate(workload: str, *options: str) -> Result:
    policies = ("--policy", "balanced", "--policy", "vllm", "--chunk-size", "512")
    command = ["simulate", "--preset", "gpt3-a100-tp8pp8", "--workload", workload, *policies, *options]
    return CliRunner().invoke(cli, command, env={"COLUMNS": "100"})


def runs(workload: str, *options: str) -> list[dict[str, Any]]:
    done = simulate(workload, *options, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return found


def test_a_workload_with_shared_prefixes_runs_with_a_cache() -> None:
    cached, off = runs(SHARED), runs(SHARED, "--prefix-cache", "off")
    assert off == runs(PLAIN) and not any(run["prefix_cache"] for run in off)
    for run in cached:
        assert run["prefix_cache"]["cached_tokens"] == 21 * 512
        assert run["prefix_cache"]["hit_rate"] == 21 * 512 / run["prompt_tokens"]
    table = simulate(SHARED).stdout
    share = f"{cached[0]['prefix_cache']['hit_rate']:.1%}"
    assert f"prompt tokens from the prefix cache: {share}" in table
    assert "prefix cache" not in simulate(PLAIN).stdout


def test_each_policy_has_its_own_share_if_they_differ() -> None:
    found = [{"policy": name, "prefix_cache": {"hit_rate": rate}} for name, rate in (("one", 0.5), ("two", None))]
    (line,) = prefix_cache_lines({"runs": [*found, {"policy": "three"}]})
    assert line.plain == "prompt tokens from the prefix cache: one 50.0%, two -"
    assert not list(prefix_cache_lines({"runs": [{"policy": "three"}]}))


def test_a_cache_without_shared_prefixes_finds_nothing() -> None:
    found = runs(PLAIN, "--prefix-cache", "all")
    assert [run["prefix_cache"]["cached_tokens"] for run in found] == [0, 0]
    assert [{**run, "prefix_cache": None} for run in found] == runs(PLAIN)


def test_a_wrong_spec_is_refused() -> None:
    done = simulate("uniform:n=4,min=100,max=200,shared=128")
    assert isinstance(done.exception, ConfigError) and "the shortest prompt has 100 tokens" in str(done.exception)
