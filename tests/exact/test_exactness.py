"""Greedy float32 output equals transformers' `generate`, token for token, for any split and batching of the work.

Every family, stage count, chunk size and policy runs in one process, over the in-process channel. The default run
covers each stage count and policy of every family that is not in BRIEF with three chunk sizes, in combinations that
differ between families. `--full` runs every combination of all families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from sarathi_pp.core import policy as policies
from tests import thinning
from tests.engine.pipeline import Outcome, run_pipeline
from tests.exact.references import LENGTHS, NEW_TOKENS, Tokens
from tests.model.families import BRIEF, FAMILIES, NUM_LAYERS, WINDOW

STAGES = (1, 2, 4)
CHUNK_SIZES = (1, 7, 16, 64, 128)  # the last one is larger than any prompt
POLICIES = ("sarathi", "orca")
# One token per microbatch is by far the slowest case: by default every seventh family runs it, on short prompts.
CHUNKS_OF_ONE = 7
SHORT = 2 * WINDOW

WINDOWED = ("qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss")

pytestmark = pytest.mark.timeout(120)


def default_cases(number: int) -> set[tuple[int, int, str]]:
    """Return the (stages, chunk size, policy) cases that the family of this number runs by default."""
    larger = CHUNK_SIZES[1:]
    cases = {
        (STAGES[(number + place) % 3], larger[(number // 3 + place) % 4], "sarathi" if place else "orca")
        for place in range(3)
    }
    if number % CHUNKS_OF_ONE == 0:
        cases.add((STAGES[(number // CHUNKS_OF_ONE) % 3], 1, "sarathi"))
    return cases


def matrix() -> Iterator[object]:
    for number, family in enumerate(FAMILIES):
        default = default_cases(number) if family not in BRIEF else set()
        for case in product(STAGES, CHUNK_SIZES, POLICIES):
            yield pytest.param(family, *case, marks=[] if case in default else [pytest.mark.full])


def test_the_default_run_covers_every_stage_count_chunk_size_and_policy_of_every_family():
    chunks_of_one, run = set(), set()
    for number in range(len(FAMILIES) - len(BRIEF)):
        stages, sizes, policies = map(set, zip(*default_cases(number), strict=True))
        assert stages == set(STAGES) and len(sizes - {1}) == 3 and policies == set(POLICIES)
        chunks_of_one |= {stages for stages, size, _ in default_cases(number) if size == 1}
        run |= {case for case in default_cases(number) if case[1] != 1}
    assert chunks_of_one == set(STAGES)
    assert run == {*product(STAGES, CHUNK_SIZES[1:], POLICIES)}, "each combination in some family"
    assert max(LENGTHS) < CHUNK_SIZES[-1] and len(LENGTHS) == 24


def expect(outcome: Outcome, outputs: Sequence[Tokens]) -> None:
    """Compare the outputs and name every prompt that differs, not only the first."""
    pairs = enumerate(zip(outcome.tokens, outputs, strict=True))
    assert not {number: pair for number, pair in pairs if pair[0] != pair[1]}


@pytest.mark.parametrize("family, stages, chunk_size, policy", list(matrix()))
def test_greedy_output_is_that_of_transformers(family, stages, chunk_size, policy, reference):
    known = reference(family)
    most = SHORT if chunk_size == 1 and not thinning.full else max(LENGTHS)
    answers = {
        prompt: output for prompt, output in zip(known.prompts, known.outputs, strict=True) if len(prompt) <= most
    }
    prompts = list(answers)
    outcome = run_pipeline(known.directory, prompts, stages=stages, chunk_size=chunk_size, policy=policy)
    expect(outcome, list(answers.values()))
    assert len(prompts) > len(LENGTHS) // 2 and outcome.reasons == ["length"] * len(prompts)
    assert outcome.num_preemptions == 0


@pytest.mark.parametrize("policy", sorted({*policies.POLICIES} - {*POLICIES}))
@pytest.mark.parametrize("family, stages", [("llama", 2), pytest.param("gemma3_text", 4, marks=pytest.mark.full)])
def test_no_policy_changes_a_token(family, stages, policy, reference):
    known = reference(family)
    expect(run_pipeline(known.directory, known.prompts, stages=stages, chunk_size=16, policy=policy), known.outputs)


def preempting() -> Iterator[object]:
    """Return every family in every shape; by default, one family in each shape and one shape for each family."""
    shapes = ((1, "orca"), (2, "sarathi"), (4, "sarathi"), (2, "balanced"))
    for number, family in enumerate(("llama", *WINDOWED)):
        for place, shape in enumerate(shapes):
            default = number == 0 or number % len(shapes) == place
            yield pytest.param(family, *shape, marks=[] if default else [pytest.mark.full])


@pytest.mark.parametrize("family, stages, policy", list(preempting()))
def test_preempted_sequences_are_recomputed_to_the_same_tokens(family, stages, policy, reference):
    known = reference(family)
    outcome = run_pipeline(
        known.directory, known.prompts, stages=stages, policy=policy, chunk_size=16, num_pages=30, page_size=4
    )
    assert outcome.num_preemptions > 0
    expect(outcome, known.outputs)


@pytest.mark.parametrize("family, inflight", [pytest.param("llama", 2, marks=pytest.mark.full), ("gemma3_text", 6)])
def test_sequences_that_are_preempted_over_and_over_keep_their_tokens(family, inflight, reference):
    """With short prompts and long outputs, many sequences are admitted, and few can stay."""
    answers = reference(family).longer(40, longest_prompt=20)
    assert len(answers) >= 10
    directory, prompts = reference(family).directory, list(answers)
    outcome = run_pipeline(
        directory, prompts, stages=2, inflight=inflight, num_pages=32, page_size=2, max_new_tokens=40
    )
    assert outcome.num_preemptions > len(prompts)
    expect(outcome, list(answers.values()))


@pytest.mark.parametrize("per_take", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_requests_that_arrive_a_few_at_a_time_get_the_same_tokens(family, per_take, reference):
    known = reference(family)
    outcome = run_pipeline(known.directory, known.prompts, stages=2, chunk_size=32, per_take=per_take)
    expect(outcome, known.outputs)


@pytest.mark.parametrize("num_seqs", [1, 5])
def test_few_seats_give_the_same_tokens(num_seqs, reference):
    known = reference("qwen3")
    outcome = run_pipeline(known.directory, known.prompts, stages=4, chunk_size=16, max_num_seqs=num_seqs)
    expect(outcome, known.outputs)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_page_size_changes_no_token(page_size, reference):
    known = reference("mistral")
    outcome = run_pipeline(
        known.directory, known.prompts, stages=2, chunk_size=16, page_size=page_size, num_pages=2048 // page_size
    )
    expect(outcome, known.outputs)


@pytest.mark.parametrize("inflight", [1, 5])
def test_the_number_of_microbatches_in_flight_changes_no_token(inflight, reference):
    known = reference("gemma2")
    outcome = run_pipeline(known.directory, known.prompts, stages=2, chunk_size=7, inflight=inflight)
    expect(outcome, known.outputs)


def uneven() -> Iterator[object]:
    """Yield every family with every split; by default, each split in one family."""
    splits = ((3, 2), (1, 4), (2, 2, 1), (1, 1, 3), (1, 2, 1, 1), (1, 1, 1, 1, 1))
    for number, family in enumerate(("llama", "gpt_oss", "opt")):
        for place, split in enumerate(splits):
            yield pytest.param(family, split, marks=[] if place % 3 == number else [pytest.mark.full])


@pytest.mark.parametrize("family, split", list(uneven()))
def test_layers_that_stages_do_not_divide(family, split, reference):
    known = reference(family)
    outcome = run_pipeline(known.directory, known.prompts, stages=len(split), chunk_size=64, layer_split=split)
    assert sum(split) == NUM_LAYERS
    expect(outcome, known.outputs)


@pytest.mark.parametrize("num_eos", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_an_end_token_ends_the_output_where_generate_ends(family, num_eos, reference):
    """End tokens come from the middle of known outputs, so that some end early and some do not."""
    known = reference(family)
    eos = [known.outputs[number][NEW_TOKENS // 2] for number in range(num_eos)]
    expected = [known.generate(prompt, NEW_TOKENS, eos) for prompt in known.prompts]
    early = [len(output) < NEW_TOKENS for output in expected]
    assert any(early) and not all(early)
    outcome = run_pipeline(known.directory, known.prompts, stages=2, chunk_size=16, eos_token_ids=eos)
    expect(outcome, expected)
    ended = [output[-1] in eos for output in expected]
    assert outcome.reasons == ["stop" if stopped else "length" for stopped in ended]


@pytest.mark.parametrize("num_pages", [35, 36])
def test_outputs_end_at_the_longest_legal_sequence(num_pages, reference):
    """max_model_len limits the sequence to 71 tokens, even if the KV cache holds 70: the last token needs no slot
    there.

    A prompt of that length needs one, and gets an empty answer.
    """
    known, most = reference("smollm3"), 71
    longest = min(most, 2 * num_pages)
    fitting = [number for number, prompt in enumerate(known.prompts) if len(prompt) <= longest]
    outcome = run_pipeline(
        known.directory,
        [known.prompts[number] for number in fitting],
        stages=2,
        chunk_size=16,
        max_model_len=most,
        num_pages=num_pages,
        page_size=2,
    )
    expected = [known.prefixes(most)[number] for number in fitting]
    lengths = {len(output) for output in expected}
    assert most - 65 in lengths and (0 in lengths) == (longest == most)
    assert outcome.tokens == expected
    assert set(outcome.reasons) == {"length"}


def test_windows_are_shorter_than_most_prompts():
    assert sum(length > WINDOW for length in LENGTHS) > len(LENGTHS) // 2
