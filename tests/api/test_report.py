"""The report of the requests generated so far."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.errors import MissingError

pytestmark = pytest.mark.timeout(180)

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")
FEW = SamplingParams(max_tokens=8)


def test_reports_between_calls_and_after_the_last(tmp_path: Path) -> None:
    with LLM(ADDER, stages=2, run_dir=tmp_path / "run") as model:
        empty = model.report()
        assert empty is not None and (empty["completed"], empty["bubble_ratio"]) == (0, None)
        for calls in (1, 2):
            model.generate(["12+30=", [100_000]], FEW)
            report = model.report()
            assert report is not None and (report["completed"], report["failed"]) == (calls, calls)
            assert len(report["per_stage"]) == 2 and 0 < report["bubble_ratio"] < 1
    final = model.report()
    assert final == json.loads((tmp_path / "run" / "report.json").read_text()) and final.keys() == report.keys()
    assert (final["completed"], final["stages"]) == (2, 2) and model.close() is None


def test_causes_are_found_while_the_llm_is_open() -> None:
    with LLM(ADDER, chunk_size=16) as model:
        model.generate(["12+30="] * 60, SamplingParams(max_tokens=20, ignore_eos=True))
        report = model.report()
    assert report is not None and report["causes"] is not None


def test_a_report_of_replicas() -> None:
    with LLM(ADDER, replicas=2) as model:
        model.generate(["12+30="] * 20, FEW)
        report = model.report()
    assert report is not None and (report["completed"], report["replicas"]) == (20, 2)


def test_traces_of_another_host_are_said_to_come_at_the_end(tmp_path: Path) -> None:
    with LLM(ADDER, stages=2, run_dir=tmp_path / "run") as model:
        [trace] = (tmp_path / "run").glob("attempt-0000/trace-00001-*")
        moved = trace.rename(tmp_path / "moved")
        with pytest.raises(MissingError, match=r"the trace of stage 1 .* is on .* close\(\) returns the report"):
            model.report()
        moved.rename(trace)


def test_no_report_after_an_exception_in_the_block() -> None:
    with pytest.raises(ZeroDivisionError), LLM(ADDER) as model:
        raise ZeroDivisionError
    assert model.report() is None


def test_answers_and_the_report_have_the_number_of_cached_tokens() -> None:
    """The prompts have 33 and 34 tokens. Whole pages of 16 are shared, and the last token is always computed."""
    prompt = [5] * 33
    with LLM(ADDER, stages=2, prefix_cache="all") as model:
        (first,) = model.generate([prompt], FEW)
        (second, refused) = model.generate([[*prompt, 6], [100_000]], FEW)
        (both,) = model.generate([prompt], SamplingParams(max_tokens=2, n=2, temperature=1.0))
        report = model.report()
    assert (first.num_cached_tokens, second.num_cached_tokens, refused.num_cached_tokens) == (0, 32, None)
    assert (both.num_cached_tokens, [one.metrics["cached_tokens"] for one in both.outputs]) == (32, [32, 32])
    assert second.metrics["cached_tokens"] == 32
    assert report is not None
    cache = report["prefix_cache"]
    assert (cache["mode"], cache["prompt_tokens"], cache["cached_tokens"]) == ("all", 33 + 34 + 2 * 33, 3 * 32)
    assert cache["computed_prompt_tokens"] == 33 + 2 + 2 * 1
