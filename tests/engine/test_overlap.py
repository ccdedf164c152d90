"""Chunks that compute some tokens again, and chunks cut at paragraph ends, change no greedy token.

The tokens before a chunk's own tokens get the same keys and values again, in the same slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.trace.events import Event, Issued, RequestFinished, decode
from tests.commands.processes import COMMAND, ROOT, Files, run
from tests.engine.pipeline import run_pipeline
from tests.exact.references import LENGTHS, NEW_TOKENS

ADDER = ROOT / "examples" / "tiny-adder"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def issued_chunks(events: Sequence[Event]) -> list[Chunk]:
    texts = [event.text for event in events if isinstance(event, Issued)]
    return [chunk for text in texts for chunk in MicroBatch.parse(text).chunks]


def repeated_tokens(chunks: list[Chunk]) -> int:
    """Count prefill tokens that were computed before in the same epoch of their sequence."""
    ends: dict[tuple[int, int], int] = {}
    repeated = 0
    for chunk in chunks:
        key = chunk.sequence, chunk.epoch
        repeated += ends.get(key, 0) - chunk.start
        ends[key] = chunk.end
    return repeated


@pytest.mark.parametrize(
    ("overlap", "stages"),
    [
        *((0.3, 1), (0.1, 2), (0.3, 4)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(0.1, 1), (0.3, 2), (0.1, 4)]),
    ],
)
def test_overlap_changes_no_token(stages, overlap, reference):
    """gemma3_text has windowed and full layers, so a chunk's first rows see other keys than its last."""
    known = reference("gemma3_text")
    policy = f"chunkllm:threshold=13,overlap={overlap}"
    outcome = run_pipeline(known.directory, known.prompts, stages=stages, policy=policy)
    assert outcome.tokens == list(known.outputs)
    chunks = issued_chunks(outcome.events[0])
    assert repeated_tokens(chunks) > sum(LENGTHS) * overlap / 4
    assert all(chunk.num_tokens == 1 for chunk in chunks if chunk.decode)
    assert sum(chunk.decode for chunk in chunks) == len(LENGTHS) * (NEW_TOKENS - 1)


def test_overlap_changes_no_token_of_a_sequence_that_is_recomputed(reference):
    known = reference("gemma3_text")
    outcome = run_pipeline(
        known.directory, known.prompts, stages=2, policy="chunkllm:threshold=9,overlap=0.3", num_pages=30, page_size=4
    )
    assert outcome.num_preemptions > 0
    assert outcome.tokens == list(known.outputs)
    assert repeated_tokens(issued_chunks(outcome.events[0])) > 0


def test_a_request_is_first_issued_once_though_its_first_tokens_are_computed_twice(reference):
    """The second chunk starts at token 0 again if the first paragraph is shorter than the overlap."""
    known = reference("gemma3_text")
    prompts = [prompt for prompt in known.prompts if len(prompt) >= 40]
    outcome = run_pipeline(
        known.directory,
        prompts,
        stages=2,
        policy="chunkllm:threshold=20,overlap=0.3",
        paragraph_ends=[(4, 30)] * len(prompts),
    )
    assert outcome.tokens == [known.outputs[known.prompts.index(prompt)] for prompt in prompts]
    events = outcome.events[0]
    started: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, Issued):
            for chunk in MicroBatch.parse(event.text).chunks:
                if chunk.start == 0:
                    started.setdefault(chunk.sequence, []).append(event.at_s)
    finished = {event.index: event.first_issue_s for event in events if isinstance(event, RequestFinished)}
    assert finished == {sequence: times[0] for sequence, times in started.items()}
    assert any(len(times) > 1 for times in started.values())


# One token per character and one before all of them, so the paragraph ends after 8.
TWO_PARAGRAPHS = "1+2=3\n\n12+30="
SPEC = "chunkllm:threshold=10,overlap=0.2"


def prefill_chunks(trace: Path) -> set[tuple[int, int]]:
    chunks = issued_chunks([decode(line) for line in trace.read_text().splitlines()])
    return {(chunk.start, chunk.end) for chunk in chunks if not chunk.decode}


def test_generate_cuts_prompts_at_their_paragraphs(tmp_path):
    """Prompts run whole only if fewer than four are present: those read first, and the last ones."""
    files = Files(tmp_path)
    files.input.write_text("".join(json.dumps({"prompt": TWO_PARAGRAPHS}) + "\n" for _ in range(40)))
    run((*COMMAND, *files.options(ADDER, "--policy", SPEC, "--quiet", "--max-new-tokens", "2")), tmp_path)
    assert [row["text"] for row in files.rows()] == ["42"] * 40
    assert {(0, 8), (7, 14)} <= prefill_chunks(files.traces()[0]) <= {(0, 8), (7, 14), (0, 14), (8, 14)}


@pytest.mark.parametrize("prompt", [TWO_PARAGRAPHS, [1, 5, 14, 6, 15, 7, 3, 3, 5, 6, 14, 7, 4, 15]])
def test_an_llm_cuts_prompts_at_their_paragraphs_where_it_has_their_text(prompt, tmp_path):
    with LLM(str(ADDER), policy=SPEC, run_dir=tmp_path / "run") as llm:
        outputs = llm.generate([prompt] * 5, SamplingParams(max_new_tokens=2))
    assert [output.outputs[0].text for output in outputs] == ["42"] * 5
    (trace,) = (tmp_path / "run").glob("attempt-0000/trace-*.jsonl")
    first = {end for start, end in prefill_chunks(trace) if start == 0}
    assert first == ({8, 14} if isinstance(prompt, str) else {10, 14})
