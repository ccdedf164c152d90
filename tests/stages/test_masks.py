"""Masks are computed once, where the token is drawn, and the wait for them is measured and counts as progress."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow, Scored
from sarathi_pp.drawing.grammar import GrammarThread, Guide, NextMask
from sarathi_pp.errors import InputError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages import token_draw
from sarathi_pp.stages.model_stage import ModelStage
from sarathi_pp.structured_outputs import StructuredOutputs
from sarathi_pp.text.grammar import grammar_text
from sarathi_pp.trace.events import Compute, Head, decode, encode
from tests.drawing.masks import computed
from tests.engine.pipeline import run_pipeline
from tests.text.grammar_model import EOS, write_grammar_model
from tests.text.test_tokenizer import byte_level

VOCAB = 50
PROMPTS = [tuple(range(3, 10 + number)) for number in range(4)]
PARAMS = SamplingParams(max_new_tokens=12, seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_grammar_model(tmp_path_factory.mktemp("model"))


def rules(regex: str = "[a-z]{9}") -> list[DrawRules | None]:
    grammar = grammar_text(StructuredOutputs("regex", regex))
    return [DrawRules(num_prompt=len(prompt), grammar=grammar, end_token_ids=(EOS,)) for prompt in PROMPTS]


class SlowMask:
    """A guide whose mask is ready only after the stage has reported progress in its wait."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()
        self.mask = NextMask(cast(Any, self), [])
        self.num_begun = 0

    def add(self, token_id: int) -> None:
        pass

    def next_mask(self) -> NextMask:
        return self.mask

    def compute(self, masks: Sequence[NextMask]) -> Future[None]:
        assert list(masks) == [self.mask]
        self.num_begun += 1
        return self.done


def test_a_wait_for_a_mask_is_measured_and_counts_as_progress(monkeypatch):
    monkeypatch.setattr(token_draw, "_WAIT_S", 0.02)
    slow, before = SlowMask(), 7
    begun: list[int] = []  # masks when the layers began
    part: Any = SimpleNamespace(has_lm_head=False, embed=True, bytes_read=0, steps=[before])
    part.forward = lambda *_: begun.append(slow.num_begun)
    head: Any = SimpleNamespace(forward=lambda rows: torch.arange(VOCAB).float().repeat(len(rows), 1), bytes_read=0)
    grammars: Any = SimpleNamespace(guide=lambda rules: slow, compute=slow.compute)
    kv: Any = SimpleNamespace(num_pages=10, page_size=16, num_slots=0)
    stage = ModelStage(part, kv, 8, torch.float32, torch.device("cpu"), head, grammars=grammars)

    def answer() -> None:
        for _ in range(5000):  # not for ever, so that a stage without progress fails the test
            if stage.steps >= before + 3:
                break
            threading.Event().wait(0.001)
        slow.mask.value = np.array([1 << 5, 0], np.uint32)
        slow.done.set_result(None)

    given = DrawRules(num_prompt=1, grammar="any").to_bytes()
    row = SamplingRow(1, 0.0, 0, 1.0, 0.0, 1)
    chunk = Chunk(0, 0, 0, 1, token_ids=(1,), new_pages=(0,), sampling=row, rules=given)
    microbatch = MicroBatch(0, (chunk,), (), head_on_first=True)
    compute = stage.prepare(microbatch)
    assert slow.num_begun == 0, "the interpreter's lock is not free yet"
    for _ in range(2):  # a second attempt, after memory has run out
        compute(None)
    assert begun == [1, 1] and slow.num_begun == 1, "a grammar takes each token once"
    thread = threading.Thread(target=answer)
    thread.start()
    output = stage.prepare_head(microbatch)(torch.zeros(1, 8))
    thread.join()
    assert output.tokens[0].token_id == 5 and stage.steps >= before + 3
    assert output.mask_s is not None and output.mask_s >= 0.06


def test_a_row_whose_prompt_is_scored_follows_its_grammar_too():
    mask = SlowMask()
    mask.mask.value = np.array([1 << 5, 0], np.uint32)
    mask.done.set_result(None)
    head = SimpleNamespace(forward=lambda rows: torch.arange(VOCAB).float().repeat(len(rows), 1))
    part: Any = SimpleNamespace(has_lm_head=True, embed=True, bytes_read=0, steps=[0], rows_head=lambda: head)
    part.forward_rows = lambda x, inputs, kv: torch.zeros(2, 8)
    kv: Any = SimpleNamespace(num_pages=10, page_size=16, num_slots=0)
    grammars: Any = SimpleNamespace(guide=lambda rules: mask, compute=mask.compute)
    stage = ModelStage(part, kv, 8, torch.float32, torch.device("cpu"), grammars=grammars)
    given = DrawRules(num_prompt=2, grammar="any").to_bytes()
    row, scored = SamplingRow(1, 0.0, 0, 1.0, 0.0, 1), Scored(1, 2, 0, -1)
    chunk = Chunk(0, 0, 0, 2, token_ids=(1, 2), new_pages=(0,), sampling=row, rules=given, scored=scored)
    output = stage.prepare(MicroBatch(0, (chunk,), ()))(None)
    assert [token.token_id for token in output.tokens] == [5] and not output.tokens[0].failure
    assert mask.num_begun == 1 and output.mask_s is not None and len(output.prompt_logprobs) == 1


def test_each_mask_is_computed_once_and_its_wait_is_in_the_span_that_drew(model, monkeypatch):
    num_masks, mask_after = [0], Guide.mask_after

    def slow(self: Guide, new: list[int]) -> Any:
        num_masks[0] += 1
        threading.Event().wait(0.005)
        return mask_after(self, new)

    monkeypatch.setattr(Guide, "mask_after", slow)
    found = run_pipeline(model, PROMPTS, stages=2, sampling=[PARAMS] * 4, rules=rules(), eos_token_ids=(EOS,))
    assert num_masks[0] == sum(map(len, found.tokens))
    first, last = found.events
    drawn_s = [one.mask_s for one in first if isinstance(one, Head)]
    spans = [one for one in (*first, *last) if isinstance(one, Compute | Head) and one.mask_s is not None]
    assert None not in drawn_s and len(drawn_s) > 1
    assert not [one for one in first if isinstance(one, Compute) and one.mask_s is not None]
    moved = {one.microbatch for one in first if isinstance(one, Head)}
    assert not {one.microbatch for one in last if isinstance(one, Compute) and one.mask_s is not None} & moved
    for span in spans:
        assert span.mask_s is not None and 0 <= span.mask_s <= span.end_s - span.start_s
        assert decode(encode(span)) == span


def test_the_vocabulary_is_read_before_the_run_and_a_failure_waits_for_the_first_grammar():
    loads = [0]

    def load() -> Any:
        loads[0] += 1
        if loads[0] == 1:
            raise InputError("no files")
        return byte_level()

    grammars = GrammarThread(SimpleNamespace(load=load))
    part: Any = SimpleNamespace(has_lm_head=True, embed=True, bytes_read=0, steps=[0])
    for expected in (1, 2, 2):
        ModelStage(part, cast(Any, None), 8, torch.float32, torch.device("cpu"), grammars=grammars).prepare_grammars()
        assert loads == [expected]
    (given, *_) = rules()
    assert given is not None
    mask = computed(grammars, grammars.guide(given))
    assert mask is not None and mask.any() and loads == [2]
    part.has_lm_head = False
    ModelStage(part, cast(Any, None), 8, torch.float32, torch.device("cpu")).prepare_grammars()


@pytest.mark.parametrize("ends", [(), (EOS,), (9,), (900,)])
def test_only_the_rules_decide_which_tokens_end_the_output(ends):
    """The library would allow the tokenizer's own end token. An end token may be above the tokenizer's vocabulary."""
    grammars = GrammarThread(SimpleNamespace(load=byte_level))
    given = DrawRules(num_prompt=1, grammar=grammar_text(StructuredOutputs("regex", "[a-z]*")), end_token_ids=ends)
    mask = computed(grammars, grammars.guide(given))
    assert mask is not None
    allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert allowed & {EOS, 9, 900} == set(ends)


def test_a_run_without_grammars_imports_no_library_starts_no_thread_and_writes_no_field(model, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(threading.enumerate())
    given: list[DrawRules | None] = [DrawRules(num_prompt=len(PROMPTS[0]), min_tokens=3), None, None, None]
    found = run_pipeline(model, PROMPTS, stages=2, sampling=[PARAMS] * 4, rules=given)
    assert not [name for name in sys.modules if name.partition(".")[0] == "llguidance"]
    assert not [one for one in threading.enumerate() if one not in before and one.name.startswith("grammar")]
    for event in found.events[0]:
        assert '"w":' not in encode(event)
