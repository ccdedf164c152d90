"""Answers as they come, and loops over them that end early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.errors import ConfigError, PeerLostError
from sarathi_pp.trace.clock import SystemClock
from tests.machine import patient

pytestmark = pytest.mark.timeout(180)

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")
FEW = SamplingParams(max_tokens=8)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module", params=[{}, {"replicas": 2}], ids=["one pipeline", "two replicas"])
def model(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(ADDER, max_num_seqs=2, kv_cache_memory="4MiB", **request.param) as made:
        yield made


def answers(model: LLM) -> list[str | None]:
    return [output.outputs[0].text for output in model.generate(["12+30=", "40+2=", "1+2="], FEW)]


def test_answers_come_one_by_one_with_the_index_of_their_prompt(model: LLM) -> None:
    answers(model)  # so that the index is not the number since loading
    lengths = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (150, 1, 2)]
    outputs = list(model.stream(["1+1=", [100_000], "1+2="], lengths))
    assert sorted(output.index for output in outputs) == [0, 1, 2] and outputs[-1].index == 0
    assert len({output.request_id for output in outputs}) == 3
    refused = next(output for output in outputs if output.index == 1)
    assert refused.error is not None and refused.error.code == "invalid_token_id"


@pytest.mark.parametrize("how", ["break", "close", "exception"])
def test_a_loop_that_ends_early_cancels_the_others(model: LLM, how: str) -> None:
    clock = SystemClock()
    prompts, stream = ["1+1="] * 400, None
    start_s = clock.now()
    if how == "close":
        stream = model.stream(prompts, [FEW, *[LONG] * 399])
        next(stream)
        stream.close()
    else:
        with pytest.raises(ZeroDivisionError):
            for _ in model.stream(prompts, [FEW, *[LONG] * 399]):
                if how == "break":
                    break
                raise ZeroDivisionError
            raise ZeroDivisionError
    assert answers(model) == ["42", "42", "3"]
    assert clock.now() - start_s < patient(8.0), "the others were computed to their end"


def test_a_call_inside_a_loop_follows_it(model: LLM) -> None:
    first, *others = (answers(model) for _ in model.stream(["1+1=", "1+2="], FEW))
    assert [first] == others == [["42", "42", "3"]]


def test_wrong_arguments_raise_before_the_first_answer(model: LLM) -> None:
    with pytest.raises(ConfigError, match="1 sampling_params were given for 2 prompts"):
        model.stream(["a", "b"], [FEW])
    with pytest.raises(ConfigError, match="use_tqdm is 3"):
        model.generate("a", FEW, use_tqdm=3)  # type: ignore[arg-type]


def test_a_stream_ends_with_its_llm() -> None:
    with LLM(ADDER, max_num_seqs=2) as model:
        stream = model.stream(["1+1="] * 50, LONG)
        next(stream)
        model.close()
        with pytest.raises((ConfigError, PeerLostError), match="closed"):
            list(stream)
