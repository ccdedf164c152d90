"""A KV cache that is too small for a request: its answer is an error, never a shorter answer."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest

from sarathi_pp import LLM, SamplingParams
from tests.commands.processes import COMMAND, ROOT, Files, environment

ADDER = ROOT / "examples" / "tiny-adder"
PROMPTS = ["1+1=", "12+30=" * 5, "40+2=" * 12]
LENGTHS = (70, 20, 3)
KIB = 1024


def answers(**options) -> list[tuple[tuple[int, ...], str] | str]:
    """Return each prompt's tokens and finish reason, or the code of its error."""
    params = [SamplingParams(max_new_tokens=most, ignore_eos=True) for most in LENGTHS]
    with LLM(str(ADDER), dtype="float32", **options) as llm:
        found = llm.generate(PROMPTS, params)
    return [
        one.error.code if one.error else (one.outputs[0].token_ids, one.outputs[0].finish_reason)  # type: ignore[misc]
        for one in found
    ]


@cache
def large_answers() -> list[tuple[tuple[int, ...], str] | str]:
    return answers(kv_cache_memory_bytes=KIB * KIB)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("chunk_size", "max_num_seqs"), [(256, 64), (7, 1), pytest.param(64, 2, marks=pytest.mark.full)]
)
def test_an_answer_is_that_of_a_large_cache_or_an_error(chunk_size, max_num_seqs):
    expected = large_answers()
    assert [len(tokens) for tokens, _ in expected] == list(LENGTHS)
    codes = set()
    for kib in (20, 40, 60, 80, 100):
        found = answers(kv_cache_memory_bytes=kib * KIB, chunk_size=chunk_size, max_num_seqs=max_num_seqs)
        for one, whole in zip(found, expected, strict=True):
            assert one in (whole, "kv_cache_exhausted"), kib
        codes |= {one if isinstance(one, str) else one[1] for one in found}
    assert codes == {"length", "kv_cache_exhausted"}, "sizes on both sides of each bound"


def generate(files: Files, *more: str) -> subprocess.CompletedProcess[str]:
    given = ("--model", str(ADDER), "--input", str(files.input), "--output", str(files.output), "--dtype", "float32")
    return subprocess.run(
        (*COMMAND, "generate", *given, *more), cwd=files.folder, env=environment(), capture_output=True, text=True
    )


@pytest.mark.timeout(180)
def test_with_more_memory_a_resumed_run_answers_what_did_not_fit(tmp_path: Path):
    files = Files(tmp_path)
    lines = ({"prompt": p, "max_tokens": n, "ignore_eos": True} for p, n in zip(PROMPTS, LENGTHS, strict=True))
    files.input.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = generate(files, "--kv-cache-memory", "80KiB")
    assert first.returncode == 3, first.stderr
    assert "max_model_len is 1152" in first.stderr and "kv_cache_exhausted" in first.stderr
    before = files.rows()
    refused = [row["error"] for row in before if "error" in row]
    assert {error["code"] for error in refused} == {"kv_cache_exhausted"} and len(refused) < len(before)
    assert all("--kv-cache-memory" in error["message"] and "--retry-errors" in error["message"] for error in refused)
    second = generate(files, "--kv-cache-memory", "1MiB", "--resume", "--retry-errors")
    assert second.returncode == 0, second.stderr
    after = files.rows()
    assert [(len(row["token_ids"]), row["finish_reason"]) for row in after] == [(n, "length") for n in LENGTHS]
    assert [row for row in before if "error" not in row] == [row for row in after if row["id"] in answered(before)]


def answered(rows: list[dict]) -> set[str]:
    return {row["id"] for row in rows if "error" not in row}
