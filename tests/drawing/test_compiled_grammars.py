"""Grammars are compiled once for all rows that have them, and these rows share no state."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.drawing.grammar import GrammarThread, Guide
from sarathi_pp.structured_outputs import StructuredOutputs
from sarathi_pp.text.grammar import grammar_text
from tests.drawing.masks import allowed
from tests.text.test_tokenizer import BYTES, plain_ids

EOS = 1
MOST_COMPILED = 64
(A,), (B,), (C,) = map(plain_ids, "abc")


class CountingMatcher:
    """The class LLMatcher, with a count of how often each grammar is compiled."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._class = llguidance.LLMatcher

    def __call__(self, vocabulary: Any, grammar: str, **options: Any) -> Any:
        self.counts[grammar] += 1
        return self._class(vocabulary, grammar, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._class, name)


@pytest.fixture
def compiled(monkeypatch) -> Counter[str]:
    """Count how often each grammar is compiled."""
    matcher = CountingMatcher()
    monkeypatch.setattr(llguidance, "LLMatcher", matcher)
    return matcher.counts


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    """Return a loader of the tokenizer."""
    return SimpleNamespace(load=lambda: BYTES)


def grammar(regex: str) -> str:
    return grammar_text(StructuredOutputs("regex", regex))


def guide(grammars: GrammarThread, regex: str) -> Guide:
    return grammars.guide(DrawRules(num_prompt=1, grammar=grammar(regex), end_token_ids=(EOS,)))


def test_rows_with_one_grammar_compile_it_once_and_share_no_state(compiled, vocabulary):
    grammars = GrammarThread(vocabulary)
    first, second = (guide(grammars, "a[b]c") for _ in range(2))
    assert allowed(grammars, first) == [A]
    first.add(A)
    assert allowed(grammars, first) == [B]
    assert allowed(grammars, second) == [A], "it began before the first row went on"
    first.add(B)
    third = guide(grammars, "a[b]c")
    assert (allowed(grammars, first), allowed(grammars, third)) == ([C], [A])
    first.add(C)
    second.add(A)
    assert (allowed(grammars, first), allowed(grammars, second)) == ([EOS], [B])
    assert compiled == {grammar("a[b]c"): 1}


def test_one_grammar_too_many_drops_the_one_that_was_not_used_for_the_longest_time(compiled, vocabulary):
    grammars = GrammarThread(vocabulary)
    regexes = [f"[abc][ab]{{{number}}}" for number in range(1, MOST_COMPILED + 2)]
    kept, dropped, *_, last = regexes
    for regex in (*regexes[:MOST_COMPILED], kept, last):
        assert allowed(grammars, guide(grammars, regex))
    assert set(compiled.values()) == {1} and len(compiled) == MOST_COMPILED + 1
    for regex in (kept, last):
        assert allowed(grammars, guide(grammars, regex))
    assert set(compiled.values()) == {1}
    again = guide(grammars, dropped)
    assert {A, B, C} <= {*(allowed(grammars, again) or ())}
    again.add(C)
    assert {A, B} <= (found := {*(allowed(grammars, again) or ())}) and C not in found
    assert {regex for regex in regexes if compiled[grammar(regex)] == 2} == {dropped}
