"""Pages that are found in the prefix cache change no bit: not of a token, and not of a log probability.

Each prompt of a reference comes three times: alone, once more, and with the first tokens of its answer, as in a chat.
The answers are known from transformers. Sampled rows and log probabilities are compared with a run without the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from sarathi_pp_kernels.cpu.simd.target import has_avx512_bf16

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.sampling_params import SamplingParams
from tests.engine.pipeline import Outcome, run_pipeline
from tests.exact.references import NEW_TOKENS, Reference, Tokens
from tests.exact.test_draw_rules import drawn_rules, generate

FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss", "qwen3_moe")
SHAPES = tuple(product((2, 3), (16, 256)))
ANSWERED = 5  # tokens of the answer that the third prompt has
HOT = {"temperature": 1.5, "top_k": 50}

pytestmark = pytest.mark.timeout(120)


def cases() -> Iterator[object]:
    """Return every family in every shape; by default, one shape for each family."""
    for number, family in enumerate(FAMILIES):
        for place, shape in enumerate(SHAPES):
            yield pytest.param(family, *shape, marks=[] if number % 4 == place else [pytest.mark.full])


def conversation(known: Reference) -> list[tuple[Tokens, Tokens]]:
    """Return prompts and greedy answers: all first questions, all again, and all second ones."""
    first = list(zip(known.prompts, known.outputs, strict=True))
    second = [(prompt + output[:ANSWERED], output[ANSWERED:]) for prompt, output in first]
    return [*first, *first, *second]


def answer(known: Reference, *, close: bool = False, **setting: object) -> Outcome:
    """Answer the conversation. Every third row is sampled, and every second one has log probabilities.

    Args:
        close: the three rows of a prompt follow each other. The outcome is in this order too.
    """
    rows = conversation(known)
    sampling = [
        SamplingParams(max_new_tokens=len(output), seed=number, **({} if number % 3 else HOT))
        for number, (_, output) in enumerate(rows)
    ]
    rules = [DrawRules(num_prompt=len(prompt), logprobs=2) for prompt, _ in rows]
    setting = {"stages": 1, "chunk_size": 16, "per_take": 3, "sampling": sampling, **setting}
    columns = [prompt for prompt, _ in rows], setting.pop("sampling"), rules
    if close:
        columns = tuple([column[number] for number in closely(known)] for column in columns)
    prompts, sampling, rules = columns
    some = [rule if number % 2 else None for number, rule in enumerate(rules)]
    return run_pipeline(known.directory, prompts, sampling=sampling, rules=some, **setting)


def closely(known: Reference) -> list[int]:
    """Return the rows of the conversation so that those of a prompt follow each other."""
    count = len(known.prompts)
    return [place + turn * count for place in range(count) for turn in range(3)]


def expect_same(found: Outcome, plain: Outcome) -> None:
    pairs = zip(found.tokens, found.logprobs, plain.tokens, plain.logprobs, strict=True)
    assert not {number: pair for number, pair in enumerate(pairs) if pair[:2] != pair[2:]}


@pytest.fixture(scope="module")
def plain(reference) -> Callable[[str], Outcome]:
    """Answer a family's conversation without the cache, once."""
    return cache(lambda family: answer(reference(family)))


@pytest.mark.parametrize("family, stages, chunk_size", list(cases()))
def test_tokens_and_log_probabilities_are_those_without_the_cache(family, stages, chunk_size, reference, plain):
    known = reference(family)
    found = answer(known, stages=stages, chunk_size=chunk_size, prefix_cache="all")
    expect_same(found, plain(family))
    for number, (_, output) in enumerate(conversation(known)):
        assert number % 3 == 0 or found.tokens[number] == output
    prompts = sum(map(len, known.prompts))
    asked = len(known.prompts)
    assert sum(found.cached_tokens[asked : 2 * asked]) > 0.8 * prompts
    answers = (sum(found.cached_tokens[2 * asked :]) - sum(found.cached_tokens[asked : 2 * asked])) / asked
    assert answers > 2, "pages with tokens of answers are found too"


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(family, marks=pytest.mark.full) for family in ("llama", "gpt_oss"))]
)
def test_sequences_that_lose_their_pages_start_again_from_those_that_are_left(family, reference, plain):
    known, small = reference(family), {"stages": 2, "num_pages": 40, "close": True, "per_take": 12}
    found = answer(known, prefix_cache="all", **small)
    assert found.num_preemptions > 0 and sum(found.cached_tokens) > 0
    assert found.tokens == [plain(family).tokens[number] for number in closely(known)]
    expect_same(found, answer(known, **small))


@pytest.mark.parametrize("policy", ["orca", "vllm", "sglang", "balanced", "chunkllm:threshold=12,overlap=0.25"])
def test_no_policy_changes_a_token(policy, reference, plain):
    found = answer(reference("qwen3"), stages=2, prefix_cache="all", policy=policy, inflight=3)
    assert sum(found.cached_tokens) > 0
    expect_same(found, plain("qwen3"))


def test_tensor_shards_share_pages_too(reference):
    known = reference("llama")
    found = answer(known, stages=2, two_shards=True, prefix_cache="all")
    assert sum(found.cached_tokens) > 0
    expect_same(found, answer(known, stages=2, two_shards=True))


@pytest.mark.skipif(not has_avx512_bf16(), reason="the rows of other bfloat16 products depend on the microbatch")
@pytest.mark.parametrize("stages, chunk_size", [(2, 16), pytest.param(3, 256, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pages_of_prompts_change_no_bit_in_bfloat16(family, stages, chunk_size, reference):
    """Decodes add up in another order than prompts, so pages with tokens of answers are not shared there."""
    known, setting = reference(family), {"dtype": torch.bfloat16, "page_size": 16, "num_pages": 512}
    found = answer(known, stages=stages, chunk_size=chunk_size, prefix_cache="prompts", **setting)
    assert sum(found.cached_tokens) > 16 * len(known.prompts)
    expect_same(found, answer(known, **setting))


def repeated(rows: list[Any]) -> list[Any]:
    return [row for row in rows for _ in range(3)]


def test_penalties_and_bans_know_the_tokens_that_were_found(reference):
    known = reference("llama")
    prompts, rules, expected = [], [], []
    for seed, prompt in enumerate(known.prompts[:10]):
        one, call = drawn_rules(prompt, seed)
        prompts.append(prompt)
        rules.append(one if call else None)
        expected.append(generate(known, prompt, call))
    sampling = [SamplingParams(max_new_tokens=len(output), seed=0) for output in expected]
    for pages in (512, 40):
        found = run_pipeline(
            known.directory,
            repeated(prompts),
            stages=2,
            rules=repeated(rules),
            sampling=repeated(sampling),
            prefix_cache="all",
            num_pages=pages,
        )
        assert found.tokens == repeated(expected)
        assert sum(found.cached_tokens) > len(prompts) and (found.num_preemptions > 0) == (pages == 40)


def test_prompts_whose_tokens_are_scored_find_the_pages_before_them(reference):
    known = reference("llama")
    prompt = known.prompts[5]
    firsts = (0, 1, 40, 41, len(prompt) - 1)
    sampling = [SamplingParams(max_new_tokens=1, seed=0, prompt_logprobs=1, logprobs_from=first) for first in firsts]
    setting = {"stages": 2, "per_take": 1, "sampling": sampling, "max_num_seqs": 1}
    found = run_pipeline(known.directory, [prompt] * len(firsts), prefix_cache="all", **setting)
    assert found.cached_tokens == [0, 0, 36, 40, 88]
    plain = run_pipeline(known.directory, [prompt] * len(firsts), **setting)
    assert found.prompt_logprobs == plain.prompt_logprobs and NEW_TOKENS > 1
