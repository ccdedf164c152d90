from dataclasses import dataclass, fields

import pytest

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.policy import POLICIES, keeps_tbt_slo, make_policy, wants_cost, with_tbt_slo
from sarathi_pp.core.policy.balanced import Balanced
from sarathi_pp.core.policy.chunkllm import ChunkLLM
from sarathi_pp.core.policy.parameter import parameter, read_parameter
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.errors import ConfigError
from tests.core.driving import drive


def test_parameters_reach_the_policy():
    assert make_policy("sarathi:even=1") == Sarathi(even=1)
    assert make_policy("chunkllm:threshold=512,overlap=0.2") == ChunkLLM(threshold=512, overlap=0.2)
    assert make_policy("chunkllm:overlap=0") == make_policy("chunkllm")


@dataclass
class Listener:
    patience: float = parameter(1.0, least=0)
    ears: int = 2


def test_a_parameter_is_read_by_its_type_and_range():
    patience, ears = fields(Listener)
    assert Listener() == Listener(1.0, 2)
    assert (read_parameter(patience, "2"), read_parameter(ears, "-3")) == (2.0, -3)
    for text in ("nan", "-1", "long"):
        with pytest.raises(ValueError, match="a number of at least 0"):
            read_parameter(patience, text)
    with pytest.raises(ValueError, match="an integer$"):
        read_parameter(ears, "2.0")


def test_both_ends_of_a_range_are_legal():
    for spec in ("chunkllm:overlap=0.3", "gllm:kvthresh=0", "gllm:kvthresh=99", "gllm:minp=1"):
        make_policy(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fifo", "choose one of .*orca, .*sarathi"),
        ("sarathi:odd=1", "no parameter 'odd'; it takes: even"),
        ("orca:x=1", "it takes: none"),
        ("sarathi:even=0,even=1", "even is given twice"),
        ("sarathi:even=x", "must be an integer"),
        ("sarathi:even=7", "even is '7'; it must be an integer from 0 to 1"),
        ("sarathi:even=-2", "even is '-2'; it must be an integer from 0 to 1"),
        ("sarathi:even=0.5", "even is '0.5'; it must be an integer"),
        ("sglang:_slots=1", "no parameter '_slots'; it takes: dynamic"),
        ("sglang:dynamic=2", "dynamic is '2'; it must be an integer from 0 to 1"),
        ("gllm:iterp=0", "iterp is '0'; it must be an integer of at least 1"),
        ("gllm:kvthresh=100", "it must be an integer from 0 to 99"),
        ("chunkllm:threshold=1.5", "it must be an integer of at least 0"),
        ("chunkllm:overlap=0.31", "overlap is '0.31'; it must be a number from 0 to 0.3"),
        ("chunkllm:overlap=-0.1", "it must be a number from 0 to 0.3"),
        ("chunkllm:overlap=nan", "it must be a number from 0 to 0.3"),
        ("chunkllm:overlap=much", "it must be a number from 0 to 0.3"),
    ],
)
def test_unknown_names_keys_and_values_are_errors(spec, says):
    with pytest.raises(ConfigError, match=says):
        make_policy(spec)


@dataclass
class Punctual:
    tbt_slo: float = parameter(0.0, least=0)
    ears: int = 2


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("balanced", Balanced(1 / 3)), ("punctual", Punctual(1 / 3, 2)), ("punctual:ears=3", Punctual(1 / 3, 3))],
)
def test_a_bound_on_the_time_between_tokens_is_added_to_what_a_policy_was_told(spec, expected, monkeypatch):
    monkeypatch.setitem(POLICIES, "punctual", Punctual)
    assert keeps_tbt_slo(spec)
    assert make_policy(with_tbt_slo(spec, 1 / 3)) == expected


def test_a_bound_is_given_once_and_to_a_policy_that_keeps_it():
    with pytest.raises(ConfigError, match="tbt_slo is given twice"):
        make_policy(with_tbt_slo("balanced:tbt_slo=0.5", 0.5))
    for spec in ("sglang", "sglang:dynamic=1", "nonsense"):
        assert not keeps_tbt_slo(spec)
    with pytest.raises(ConfigError, match="--tbt-slo 0.5: sglang keeps no bound"):
        with_tbt_slo("sglang:dynamic=1", 0.5)
    assert with_tbt_slo("nonsense", 0.5) == "nonsense"  # make_policy says what there is


@pytest.mark.parametrize("spec", [*POLICIES, "sglang:dynamic=1", "calibration"])
def test_the_policies_that_ask_what_microbatches_cost_are_listed(spec):
    """To learn it for the others would be time for nothing; one that asks in vain schedules badly."""
    asked = []
    policy = make_policy(spec)

    class Watched:
        def __init__(self, view):
            self.view = view

        def __getattr__(self, name):
            asked.append(name)
            return getattr(self.view, name)

    class Watching:
        def pick(self, view):
            return policy.pick(Watched(view))

    requests = [Request(i, (1,) * 20 * i, SamplingParams(max_new_tokens=4, seed=0)) for i in range(1, 6)]
    drive(Coordinator(Limits(2, 16, 4, 256, 16, 64, 3), Watching()), requests, [0] * 5)
    assert asked
    assert wants_cost(spec) == ("cost" in asked or spec == "sglang"), "only with `dynamic` does sglang ask"
