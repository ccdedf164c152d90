"""`generate --device cuda` in processes with simulated GPUs: every token equals transformers', and nothing races."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.commands.processes import COMMAND, Files
from tests.exact.answers import make_reference
from tests.exact.references import Reference
from tests.exact.rounding_cache import generate as generate_rounded
from tests.machine import patient
from tests.mockgpu.processes import with_gpus
from tests.model.families import with_layers

NEW_TOKENS = 3
# Few and short: Triton's interpreter takes a second for microseconds of a device.
LONGEST, MOST, LAYERS = 13, 3, 2


@pytest.fixture(scope="module", params=["llama"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    return make_reference(request.param, folder, config=with_layers(request.param, LAYERS))


def generate(
    reference: Reference,
    folder: Path,
    gpus: int,
    *options: str,
    twice: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
    float8: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate, compare the answers, and return the resolved run and its report.

    Args:
        twice: length of the only prompt, which comes twice; 0 for other prompts, once each.
        variables: more environment variables.
        float8: the answers are those with keys and values in FP8.
    """
    files = Files(folder)
    asked = [
        (prompt, output[:NEW_TOKENS])
        for prompt, output in zip(reference.prompts, reference.outputs, strict=True)
        if (len(prompt) == twice if twice else len(prompt) <= LONGEST)
    ][:MOST]
    asked *= 2 if twice else 1
    if float8:
        asked = [(prompt, generate_rounded(reference.model, prompt, NEW_TOKENS)[0]) for prompt, _ in asked]
    files.write_prompts([prompt for prompt, _ in asked])
    few = ("--chunk-size", "7", "--max-num-seqs", "2", "--max-new-tokens", str(NEW_TOKENS), "--ignore-eos")
    command = (*COMMAND, *files.options(reference.directory, "--device", "cuda", "--dtype", "float32", *few, *options))
    hazards = folder / "hazards"
    env = {**with_gpus(gpus, hazards), **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(280))
    assert not hazards.exists(), hazards.read_text()
    assert done.returncode == 0, done.stderr[-3000:]
    assert files.tokens() == [tokens for _, tokens in asked]
    return json.loads((files.run / "run.json").read_text()), files.report()


@pytest.mark.parametrize(
    ("gpus", "options", "transport"),
    [
        (1, ("--stages", "1"), "gloo"),
        pytest.param(1, ("--stages", "2"), "gloo", marks=pytest.mark.full),
        pytest.param(2, ("--stages", "2"), "nccl", marks=pytest.mark.full),
        pytest.param(2, ("--stages", "2", "--replicas", "2"), "gloo", marks=pytest.mark.full),
        pytest.param(4, ("--stages", "2", "--replicas", "2"), "nccl", marks=pytest.mark.full),
        (2, ("--stages", "1", "--tensor-parallel-size", "2"), "nccl"),
        pytest.param(4, ("--stages", "2", "--tensor-parallel-size", "2"), "nccl", marks=pytest.mark.full),
    ],
    ids=["alone", "shared", "nccl", "two-on-each", "replicas", "shards", "shards-of-two-stages"],
)
def test_pipelines_by_graphs(
    reference: Reference, tmp_path: Path, gpus: int, options: tuple[str, ...], transport: str
) -> None:
    run, report = generate(reference, tmp_path, gpus, *options)
    assert (run["transport"], run["attention"]) == (transport, "triton")
    assert run["issues_ahead"] == (options == ("--stages", "1"))
    assert all(stage["graph_hit_rate"] == 1.0 for stage in report["per_stage"])


def test_graphs_read_the_pages_that_prompts_share(reference: Reference, tmp_path: Path) -> None:
    run, report = generate(reference, tmp_path, 2, "--stages", "2", twice=17)
    assert (run["transport"], run["prefix_cache"], run["attention"]) == ("nccl", "prompts", "triton")
    assert report["prefix_cache"]["cached_tokens"] == 16
    assert all(stage["graph_hit_rate"] == 1.0 for stage in report["per_stage"])


@pytest.mark.parametrize("attention", ["triton", pytest.param("sdpa", marks=pytest.mark.full)])
def test_keys_and_values_in_float8(attention: str, reference: Reference, tmp_path: Path) -> None:
    """Graphs write and read them with Triton."""
    options = ("--stages", "2", "--kv-cache-dtype", "fp8", "--attention", attention)
    run, report = generate(reference, tmp_path, 1, *options, float8=True)
    assert (run["attention"], run["kv_cache_dtype"]) == (attention, "fp8")
    expected = 1.0 if attention == "triton" else None
    assert all(stage["graph_hit_rate"] == expected for stage in report["per_stage"])


@pytest.mark.parametrize(
    ("gpus", "options", "transport"),
    [
        (1, ("--stages", "2", "--attention", "sdpa"), "gloo"),
        pytest.param(2, ("--stages", "2", "--enforce-eager"), "nccl", marks=pytest.mark.full),
        pytest.param(1, ("--stages", "1", "--tensor-parallel-size", "2"), "gloo", marks=pytest.mark.full),
    ],
    ids=["sdpa", "nccl", "shards-shared"],
)
def test_pipelines_without_graphs(
    reference: Reference, tmp_path: Path, gpus: int, options: tuple[str, ...], transport: str
) -> None:
    run, report = generate(reference, tmp_path, gpus, *options)
    assert run["transport"] == transport
    assert all(stage["graph_hit_rate"] is None for stage in report["per_stage"])


@pytest.mark.parametrize(
    ("failure", "rank"),
    [
        ("MOCK_CAPTURE_FAILS_ON", "1"),
        pytest.param("MOCK_CAPTURE_FAILS_ON", "0", marks=pytest.mark.full),
        pytest.param("MOCK_SUM_REFUSED_ON", "1", marks=pytest.mark.full),
    ],
)
def test_no_shard_of_a_stage_has_graphs_if_one_cannot_capture(
    reference: Reference, tmp_path: Path, failure: str, rank: str
) -> None:
    """The other rank captures all its graphs meanwhile, and waits for nothing. A refused sum spoils no capture."""
    sharded = ("--stages", "1", "--tensor-parallel-size", "2")
    run, report = generate(reference, tmp_path, 2, *sharded, variables={failure: rank})
    assert run["transport"] == "nccl"
    assert [stage["graph_hit_rate"] for stage in report["per_stage"]] == [None]


@pytest.mark.parametrize(
    "reference",
    ["gpt_oss", *(pytest.param(family, marks=pytest.mark.full) for family in ("gemma2", "mixtral", "qwen3"))],
    indirect=True,
)
def test_families(reference: Reference, tmp_path: Path) -> None:
    """They have soft caps and windows, experts that no graph holds, sinks, and norms of heads."""
    run, report = generate(reference, tmp_path, 1, "--stages", "2")
    assert run["attention"] == "triton"
    # torch's grouped product runs the experts. On the host here it reads the number of tokens per expert.
    captured = {None, 1.0} if reference.family in ("mixtral", "gpt_oss") else {1.0}
    assert {stage["graph_hit_rate"] for stage in report["per_stage"]} <= captured
