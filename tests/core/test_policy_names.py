from dataclasses import dataclass, fields

import pytest

from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.policy import POLICIES, Policy, PolicySpec, make_policy, parse_policy, parse_recorded, with_tbt_slo
from sarathi_pp.core.policy.balanced import Balanced
from sarathi_pp.core.policy.chunkllm import ChunkLLM
from sarathi_pp.core.policy.parameter import parameter, read_parameter
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.errors import ConfigError
from sarathi_pp.sampling_params import SamplingParams
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
class Punctual(Policy):
    tbt_slo: float = parameter(0.0, least=0)
    ears: int = 2

    def pick(self, view):
        return []

    def max_tokens(self, limits):
        return 1


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (parse_policy("balanced"), Balanced(1 / 3)),
        (PolicySpec("punctual", Punctual), Punctual(1 / 3, 2)),
        (PolicySpec("punctual", Punctual, ("ears=3",)), Punctual(1 / 3, 3)),
    ],
    ids=str,
)
def test_a_bound_on_the_time_between_tokens_is_added_to_what_a_policy_was_told(spec, expected):
    assert spec.keeps_tbt_slo
    assert spec.with_tbt_slo(1 / 3).make() == expected


def test_a_bound_is_given_once_and_to_a_policy_that_keeps_it():
    with pytest.raises(ConfigError, match="--policy balanced:tbt_slo=0.5,tbt_slo=0.5: tbt_slo is given twice"):
        parse_policy("balanced:tbt_slo=0.5").with_tbt_slo(0.5)
    for spec in ("sglang", "sglang:dynamic=1"):
        assert not parse_policy(spec).keeps_tbt_slo
    with pytest.raises(ConfigError, match="--tbt-slo 0.5: sglang keeps no bound"):
        parse_policy("sglang:dynamic=1").with_tbt_slo(0.5)
    with pytest.raises(ConfigError, match="--tbt-slo 0.5: sglang keeps no bound"):
        with_tbt_slo("sglang", 0.5)
    assert with_tbt_slo("balanced", 0.5) == "balanced:tbt_slo=0.5"
    for text in ("nonsense", "balanced:odd=1", "on_other_hosts_only:Mine"):
        assert with_tbt_slo(text, 0.5) == text, "what checks the configuration refuses it"


@pytest.mark.parametrize(
    "text",
    [*POLICIES, "calibration:seed=3", "sarathi:even=1", "chunkllm:threshold=512,overlap=0.20", "balanced:tbt_slo=2"],
)
def test_a_policy_prints_as_it_was_given(text):
    """Reports, traces and run.json hold this text."""
    spec = parse_policy(text)
    assert str(spec) == text and parse_policy(str(spec)) == spec
    assert isinstance(spec.make(), Policy) and type(spec.make()) is spec.kind


@pytest.mark.parametrize(("text", "canonical"), [("sarathi:", "sarathi"), ("sarathi:even=1,", "sarathi:even=1")])
def test_separators_that_separate_nothing_are_left_out(text, canonical):
    assert str(parse_policy(text)) == canonical and parse_policy(text) == parse_policy(canonical)


def test_a_policy_that_keeps_state_is_made_anew_for_each_coordinator():
    spec = parse_policy("balanced")
    assert spec.make() is not spec.make()


def test_most_in_flight_are_the_stages_and_what_the_policy_has_to_spare():
    balanced, sarathi = parse_policy("balanced"), parse_policy("sarathi")
    assert [balanced.inflight(stages) for stages in (1, 2, 8)] == [1, 3, 9]
    assert [sarathi.inflight(stages) for stages in (1, 2, 8)] == [1, 2, 8]


@pytest.mark.parametrize("text", ["of-tomorrow", "sarathi:odd=1", "antigravity:fly", "this"])
def test_what_a_trace_names_is_built_in_or_nothing(text, capsys):
    assert parse_recorded(text) is None
    assert not capsys.readouterr().out, "nothing is imported for a trace"
    assert parse_recorded("sarathi:even=1") == parse_policy("sarathi:even=1")


@pytest.mark.parametrize("spec", [*POLICIES, "sglang:dynamic=1", "calibration"])
def test_the_policies_that_ask_what_microbatches_cost_are_listed(spec):
    """Learning costs for other policies would waste time. A policy that gets none when it asks schedules badly."""
    asked = []
    policy = make_policy(spec)

    class Watched:
        def __init__(self, view):
            self.view = view

        def __getattr__(self, name):
            asked.append(name)
            return getattr(self.view, name)

    class Watching(Policy):
        def pick(self, view):
            return policy.pick(Watched(view))

        def max_tokens(self, limits):
            return policy.max_tokens(limits)

    requests = [Request(i, (1,) * 20 * i, SamplingParams(max_new_tokens=4, seed=0)) for i in range(1, 6)]
    drive(Coordinator(Limits(2, 16, 4, 256, 16, 64, 3), Watching()), requests, [0] * 5)
    assert asked
    assert parse_policy(spec).kind.wants_cost == ("cost" in asked or spec == "sglang"), (
        "only with `dynamic` does sglang ask"
    )
