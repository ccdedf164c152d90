"""Progress reports of the engine, on a clock that moves only while a microbatch runs."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.plan import SampledToken, StageTime, StepResult
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.engine.engine import Engine
from sarathi_pp.engine.progress import Progress
from sarathi_pp.inputs.row import Row
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire.channel import QueueChannel
from tests.engine.pipeline import ListRecorder, ListSink, ListSource

COMPUTE_S = (0.5, 0.25)


class OneSecondPipeline:
    """Two stages in one: each microbatch is back one second after it was issued."""

    def __init__(self, results: QueueChannel, clock: ManualClock) -> None:
        self._results = results
        self._clock = clock
        self.num_taken = self.num_unsent = 0

    def run(self, frame, hidden, arrived_s) -> None:
        self._clock.sleep(1.0)
        chunks = frame.microbatch.chunks
        tokens = tuple(SampledToken(c.sequence, c.epoch, 7) for c in chunks if c.sampling is not None)
        times = tuple(StageTime(frame.microbatch.index, seconds) for seconds in COMPUTE_S)
        self._results.send(StepResult(frame.microbatch.index, tokens, times))
        self.num_taken += 1

    def send_results(self) -> None:
        pass

    def close(self) -> None:
        self._results.close()


def reports(
    prompt_tokens: int,
    max_new_tokens: int,
    issue_after_s: float = 0.0,
    *,
    requests: int = 1,
    num_pages: int = 16,
    prefix_cache: PrefixCacheMode = "off",
) -> list[Progress]:
    """Return the reports of equal requests, cut into chunks of 4 tokens on pages of 4."""
    clock = ManualClock()
    results = QueueChannel(clock, 4)
    limits = Limits(2, 4, 8, 64, 4, num_pages, 1, prefix_cache=prefix_cache)
    seen: list[Progress] = []
    engine = Engine(
        limits,
        make_policy("sarathi"),
        OneSecondPipeline(results, clock),
        results,
        ListRecorder(),
        clock,
        eos_token_ids=(),
        stop_checkers=lambda stop: None,
        listener=Mock(report_progress=seen.append),
    )
    clock.sleep(issue_after_s)
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    made = (Request(index, tuple(range(prompt_tokens)), params, clock.now()) for index in range(requests))
    engine.run(ListSource([Row(1 + request.index, request.index, "own", request) for request in made]), ListSink())
    engine.close()
    return seen


def test_chunks_compute_and_fragmentation_are_those_of_what_came_back() -> None:
    *results, last = reports(prompt_tokens=10, max_new_tokens=3)
    assert [seen.chunks_done for seen in results] == [1, 2, 3, 3, 3]
    assert [seen.microbatches_done for seen in results] == [1, 2, 3, 4, 5]
    assert [seen.stage_compute_s for seen in results] == [(0.5 * n, 0.25 * n) for n in (1, 2, 3, 4, 5)]
    # 4, 8, 10, 11 tokens on 1, 2, 3, 3 pages of 4; after the last result the request is gone.
    wasted = [seen.kv_fragmentation for seen in results]
    assert wasted[:4] == pytest.approx([0.0, 0.0, 1 - 10 / 12, 1 - 11 / 12]) and wasted[4] is None
    assert (last.requests_done, last.prompt_tokens, last.output_tokens) == (1, 10, 3)


def test_tokens_count_before_their_request_ends() -> None:
    *results, last = reports(prompt_tokens=10, max_new_tokens=3)
    assert [seen.tokens_computed for seen in results] == [4, 8, 11, 12, 13]
    assert results[1].tokens_per_s == 8 / 2 and results[1].prompt_tokens == 0
    assert last.tokens_computed == 13


def test_tokens_that_are_computed_again_after_a_preemption_count_once() -> None:
    *results, last = reports(prompt_tokens=10, max_new_tokens=20, requests=2, num_pages=9)
    assert last.chunks_done > 2 * 3, "no request was preempted, so nothing was computed again"
    assert last.tokens_computed == last.prompt_tokens + last.output_tokens == 2 * 30


def test_busy_is_of_the_last_moments_and_the_bubble_of_the_window() -> None:
    *results, last = reports(prompt_tokens=10, max_new_tokens=3, issue_after_s=2.0)
    assert [seen.window_s for seen in results] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {seen.bubble_ratios for seen in results} == {(0.5, 0.75)}
    assert results[0].stage_busy == pytest.approx((0.5 / 3, 0.25 / 3))
    assert results[1].stage_busy == COMPUTE_S
    assert results[1].chunk_throughput == 1.0
    assert (last.window_s, last.elapsed_s) == (5.0, 7.0)


def test_without_a_result_there_is_no_window() -> None:
    (only,) = reports(prompt_tokens=10, max_new_tokens=0)
    assert (only.window_s, only.bubble_ratios, only.chunks_done, only.kv_fragmentation) == (0.0, (), 0, None)


def test_cached_tokens_count_once_and_have_counts_of_their_own() -> None:
    """Three prompts of 10 tokens on pages of 4: two of them find 8 tokens."""
    *_, last = reports(prompt_tokens=10, max_new_tokens=3, requests=3, prefix_cache="prompts")
    assert last.tokens_computed == last.prompt_tokens + last.output_tokens == 3 * 13
    assert (last.prefix_queried_tokens, last.prefix_cached_tokens) == (30, 16)
    two = Progress.of_replicas([last, last])
    assert (two.prefix_queried_tokens, two.prefix_cached_tokens) == (60, 32)
    now = last.since(replace(last, prefix_queried_tokens=20, prefix_cached_tokens=8))
    assert (now.prefix_queried_tokens, now.prefix_cached_tokens) == (10, 8)
    *_, off = reports(prompt_tokens=10, max_new_tokens=3, requests=3)
    assert (off.prefix_queried_tokens, off.prefix_cached_tokens) == (0, 0)
