"""The number of rows that the engine takes from its source before they can run."""

from __future__ import annotations

from types import SimpleNamespace

from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.engine.engine import Engine
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.trace.clock import ManualClock
from sarathi_pp.wire.channel import QueueChannel
from tests.engine.pipeline import ListRecorder, ListSink


def admitted(lengths: list[int], max_num_seqs: int, max_new_tokens: int = 8) -> tuple[Engine, MemorySource]:
    """Return an engine that has looked once at a source of prompts of these lengths."""
    clock = ManualClock()
    engine = Engine(
        Limits(2, 16, max_num_seqs, 512, 4, 512, 2),
        make_policy("sarathi"),
        SimpleNamespace(holds_sequences=True),  # nothing is run
        QueueChannel(clock, 1),
        ListRecorder(),
        clock,
        eos_token_ids=(),
        stop_checkers=lambda stop: None,
    )
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    requests = (Request(index, (1,) * length, sampling) for index, length in enumerate(lengths))
    source = MemorySource([Row(request.index + 1, request.index, "own", request) for request in requests])
    engine._admit(source, ListSink())
    return engine, source


def test_as_many_rows_wait_as_may_run_at_once():
    engine, source = admitted([3] * 100, max_num_seqs=40)
    assert engine._coordinator.num_waiting == 40 and len(source.take(100)) == 60


def test_long_prompts_wait_up_to_a_number_of_tokens(monkeypatch):
    monkeypatch.setattr("sarathi_pp.engine.engine.MAX_WAITING_TOKENS", 1000)
    engine, source = admitted([100] * 200, max_num_seqs=150)
    assert engine._coordinator.num_waiting == 16, "what is taken at a time"
    engine._admit(source, ListSink())
    assert engine._coordinator.num_waiting == 16 and not source.exhausted


def test_a_look_ends_also_if_its_rows_are_answered_at_once():
    """Otherwise a file of such rows would be read to its end before a signal is handled."""
    engine, source = admitted([3] * 100, max_num_seqs=32, max_new_tokens=0)
    assert engine._coordinator.num_waiting == 0 and len(source.take(200)) == 68
