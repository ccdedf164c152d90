"""A grammar that is meant to take for ever is refused, or its row ends, and a row next to it goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.drawing.grammar import GrammarThread, Guide
from sarathi_pp.errors import RowError
from sarathi_pp.structured_outputs import StructuredOutputs
from sarathi_pp.text.grammar import grammar_text, structured_outputs
from tests.drawing.masks import allowed
from tests.text.hostile_grammars import HOSTILE
from tests.text.test_tokenizer import BYTES, plain_ids

EOS = 1
NUM_TOKENS = 8


def guide_of(grammars: GrammarThread, key: str, value: Any) -> Guide:
    grammar = grammar_text(StructuredOutputs.read(structured_outputs(key, value)))
    return grammars.guide(DrawRules(num_prompt=1, grammar=grammar, end_token_ids=(EOS,)))


def ending(grammars: GrammarThread, key: str, value: Any) -> str:
    """Return how a row with this grammar ends, if it draws the last token that may follow."""
    try:
        guide = guide_of(grammars, key, value)
    except RowError as error:
        return error.code
    for _ in range(NUM_TOKENS):
        found = allowed(grammars, guide)
        if found is None:
            return "lost"
        assert found, "a mask that allows nothing"
        if found[-1] == EOS:
            return "stop"
        guide.add(found[-1])
    return "length"


@pytest.mark.timeout(90)
def test_hostile_grammars_end_and_the_row_next_to_them_goes_on():
    grammars = GrammarThread(SimpleNamespace(load=lambda: BYTES))
    neighbour = guide_of(grammars, "guided_regex", "[a]{99}")
    endings = []
    for keys in HOSTILE:
        [(key, value)] = keys.items()
        endings.append(ending(grammars, key, value))
        (expected,) = plain_ids("a")
        assert expected in (allowed(grammars, neighbour) or ())
        neighbour.add(expected)
    assert {*endings} == {"invalid_grammar", "lost", "stop", "length"}, endings
    assert endings.count("invalid_grammar") >= 3 and endings.count("lost") >= 3
