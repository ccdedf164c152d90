"""Decodes that are issued before their tokens are known change no token, and the device gets work without a pause.

The stage is on CPU here, where a draw is not later than its launch. So the order of the host's steps is checked.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import pytest
import torch

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import Chunk, MicroBatch, SampledToken
from sarathi_pp.core.policy import POLICIES, make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.core.sequence import EXPECTED
from sarathi_pp.errors import MemoryLostError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.model_stage import ModelStage
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.trace.events import Issued, Returned
from sarathi_pp.trace.timer import Instant
from sarathi_pp.wire.channel import QueueChannel
from sarathi_pp.wire.codec import MicroBatchFrame
from tests.core.driving import StandInPipeline
from tests.engine.pipeline import ListRecorder, run_pipeline
from tests.exact.references import NEW_TOKENS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def spied(monkeypatch):
    """Count the tokens that microbatches bring, and those of them whose ids only the stage knows."""
    counts = {"known": 0, "expected": 0}
    before = ModelStage.prepare

    def prepare(self, microbatch):
        ids = [token for chunk in microbatch.chunks for token in chunk.token_ids]
        counts["expected"] += ids.count(EXPECTED)
        counts["known"] += len(ids) - ids.count(EXPECTED)
        return before(self, microbatch)

    monkeypatch.setattr(ModelStage, "prepare", prepare)
    return counts


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_greedy_token_changes(policy, reference, spied):
    known = reference("llama")
    outcome = run_pipeline(known.directory, known.prompts, stages=1, policy=policy, ahead=True)
    assert outcome.tokens == list(known.outputs)
    assert spied["expected"] > len(known.prompts)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v3"])
def test_no_greedy_token_changes_under_preemption(family, reference, spied):
    known = reference(family)
    outcome = run_pipeline(known.directory, known.prompts, stages=1, ahead=True, num_pages=30)
    assert outcome.tokens == list(known.outputs)
    assert outcome.num_preemptions > 0 and spied["expected"]


def ended(output, end):
    """Return an output up to its first end token."""
    return output[: output.index(end) + 1] if end in output else output


def test_no_token_changes_if_outputs_end_and_pages_are_shared(reference, spied):
    """An output ends by a token that is not known when the next decode is issued. That decode's token is dropped."""
    known = reference("llama")
    end = known.outputs[0][3]
    # Each prompt comes again with its answer, whose pages are in the index once their tokens are known.
    again = [(*prompt, *output) for prompt, output in zip(known.prompts, known.outputs, strict=True)]
    plain = {"stages": 1, "eos_token_ids": [end], "max_num_seqs": 8, "prefix_cache": "all"}
    both = [*known.prompts, *again]
    wanted = run_pipeline(known.directory, both, **plain)
    outcome = run_pipeline(known.directory, both, **plain, ahead=True)
    assert outcome.tokens[:24] == [ended(output, end) for output in known.outputs]
    assert (outcome.tokens, outcome.reasons) == (wanted.tokens, wanted.reasons)
    assert "stop" in outcome.reasons and spied["expected"]
    assert sum(outcome.cached_tokens) > 0


def test_no_token_changes_at_random_or_with_requests_that_have_rules(reference, spied):
    """A stage must know the tokens of a request with rules. It waits for all tokens while such a request draws."""
    known = reference("llama")
    sampling = [SamplingParams(max_new_tokens=8, temperature=1.0, top_k=20, seed=index) for index in range(24)]
    penalty = [DrawRules(num_prompt=len(prompt), repetition_penalty=1.3) for prompt in known.prompts]
    rules = [penalty[place] if place % 3 == 0 else None for place in range(len(penalty))]
    drawn = {"stages": 1, "sampling": sampling, "rules": rules}
    wanted = run_pipeline(known.directory, known.prompts, **drawn)
    assert spied["expected"] == 0
    outcome = run_pipeline(known.directory, known.prompts, **drawn, ahead=True)
    assert outcome.tokens == wanted.tokens and spied["expected"]


def test_no_token_changes_when_the_long_factors_begin(reference, spied):
    known = reference("phi3_longrope")
    outcome = run_pipeline(known.directory, known.prompts, stages=1, ahead=True)
    assert outcome.tokens == list(known.outputs) and spied["expected"]


def test_prompt_logprobs_and_tokens_stay_the_same(reference, spied):
    known = reference("llama")
    sampling = [SamplingParams(max_new_tokens=8, seed=0, prompt_logprobs=place % 2) for place in range(24)]
    sampling[::3] = [SamplingParams(max_new_tokens=8, seed=0)] * 8
    asked = {"stages": 1, "sampling": sampling}
    wanted = run_pipeline(known.directory, known.prompts, **asked)
    outcome = run_pipeline(known.directory, known.prompts, **asked, ahead=True)
    assert outcome.tokens == wanted.tokens == list(known.outputs) and spied["expected"]
    assert [found and found.logprobs for found in outcome.prompt_logprobs] == [
        found and found.logprobs for found in wanted.prompt_logprobs
    ]


def test_a_microbatch_is_launched_before_the_result_of_the_one_before(reference):
    known = reference("llama")
    (events,) = run_pipeline(known.directory, known.prompts[:1], stages=1, ahead=True).events
    issued = {event.microbatch: event.at_s for event in events if isinstance(event, Issued)}
    back = {event.microbatch: event.at_s for event in events if isinstance(event, Returned)}
    assert len(issued) == len(back) > NEW_TOKENS
    assert all(issued[index + 1] < back[index] for index in range(len(issued) - 1))


class Device:
    """A stage whose tokens are known when the device is waited for, and its timer."""

    counts_cpu = False
    steps = 0

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log: list[str] = []
        self.interrupted = False
        self.failures: list[BaseException] = []

    def prepare(self, microbatch: MicroBatch):
        def compute(hidden):
            if self.failures:
                raise self.failures.pop(0)
            self.log.append(f"launch {microbatch.index}")
            return StageOutput(later=lambda: self.read(microbatch.index))

        return compute

    def read(self, index):
        assert self.log[-1] == "wait"
        self.log.append(f"read {index}")
        return (SampledToken(0, 0, index),)

    def mark(self):
        return self

    def at_s(self):
        return 0.0

    def wait(self):
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        self.log.append("wait")


def frame(index: int) -> MicroBatchFrame:
    return MicroBatchFrame(MicroBatch(index, (Chunk(0, 0, index, 1, True, (1,)),)))


def test_a_result_is_read_after_the_next_launch_or_when_it_is_asked_for():
    device = Device()
    edge: QueueChannel = QueueChannel(device.clock, 4)
    runner = StageRunner(device, edge, ListRecorder(), device.clock, device)
    runner.run(frame(0), None, Instant(0.0))
    assert device.log == ["launch 0"] and (runner.num_unsent, runner.num_taken) == (1, 1)
    runner.run(frame(1), None, Instant(0.0))
    assert device.log == ["launch 0", "launch 1", "wait", "read 0"] and (runner.num_unsent, runner.num_taken) == (1, 2)
    runner.send_results()
    assert device.log[4:] == ["wait", "read 1"] and (runner.num_unsent, runner.num_taken) == (0, 2)
    assert [edge.receive(0).frame.tokens[0].token_id for _ in range(2)] == [0, 1]


def test_an_interrupt_during_the_wait_for_a_result_loses_nothing():
    device = Device()
    edge: QueueChannel = QueueChannel(device.clock, 4)
    runner = StageRunner(device, edge, ListRecorder(), device.clock, device)
    runner.run(frame(0), None, Instant(0.0))
    device.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        runner.run(frame(1), None, Instant(0.0))
    assert runner.in_step and runner.num_taken == 2
    runner.send_results()
    assert [edge.receive(0).frame.tokens[0].token_id for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("times", [1, 2])
def test_a_microbatch_without_memory_holds_back_no_earlier_result(times: int):
    device = Device()
    edge: QueueChannel = QueueChannel(device.clock, 4)
    runner = StageRunner(device, edge, ListRecorder(), device.clock, device)
    runner.run(frame(0), None, Instant(0.0))
    device.failures = [torch.OutOfMemoryError("no memory")] * times
    with pytest.raises(MemoryLostError) if times == 2 else nullcontext() as lost:
        runner.run(frame(1), None, Instant(0.0))
    assert lost is None or not lost.value.at_start
    assert edge.receive(0).frame.tokens[0].token_id == 0 and runner.num_unsent == 2 - times
    runner.send_results()
    results = [edge.receive(0).frame] if times == 1 else []
    assert [(result.index, result.short) for result in results] == [(1, True)][: len(results)]


def test_an_error_of_the_device_ends_the_pipeline():
    device = Device()
    edge: QueueChannel = QueueChannel(device.clock, 4)
    runner = StageRunner(device, edge, ListRecorder(), device.clock, device)
    runner.run(frame(0), None, Instant(0.0))
    device.wait = lambda: (_ for _ in ()).throw(RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        runner.send_results()
    assert not runner.in_step


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_compute_a_prompt_in_no_more_microbatches(policy):
    """They do not see the microbatch in flight, so a chunk in it does not keep the next one back."""
    ends = []
    for ahead in (False, True):
        limits = Limits(1, 64, 16, 4096, 16, 512, 1, issues_ahead=ahead)
        coordinator, pipeline, inflight = Coordinator(limits, make_policy(policy)), StandInPipeline(limits), deque()
        for index in range(9):
            length = 1000 if index == 8 else 5
            sampling = SamplingParams(max_new_tokens=100, seed=0, ignore_eos=True)
            coordinator.submit(Request(index, (1,) * length, sampling))
        computed = 0
        while computed < 1000:
            microbatch = coordinator.next_microbatch()
            if microbatch is not None:
                inflight.append(microbatch)
                computed = max([chunk.end for chunk in microbatch.chunks if chunk.sequence == 8], default=0)
            if microbatch is None or len(inflight) > ahead:
                coordinator.complete(pipeline.run(inflight.popleft()))
        ends.append(coordinator.num_issued)
    assert ends[1] <= ends[0] + 2
