"""A misspelled key, and the key that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.inputs.line_keys import OWN_KEYS
from sarathi_pp.inputs.spelling import nearest_key

LONG = [key for key in OWN_KEYS if len(key) >= 6]


@pytest.mark.parametrize(
    ("key", "meant"),
    [("Temperature", "temperature"), ("stops", "stop"), ("seeed", "seed"), ("topp", "top_p"), ("esed", "seed")],
)
def test_one_mistake_in_a_short_key(key, meant):
    assert nearest_key(key, ("temperature", "stop", "seed", "top_p")) == meant


@pytest.mark.parametrize("key", ["step", "speed", "seed1", "prompt_b", "temp", "label"])
def test_another_word_is_no_mistake(key):
    assert nearest_key(key, ("temperature", "stop", "seed", "prompt")) is None


@given(st.sampled_from(LONG), st.data())
def test_one_wrong_missing_or_swapped_character_of_a_long_key_is_found(key, data):
    at = data.draw(st.integers(0, len(key) - 2))
    wrong = [key[:at] + "#" + key[at + 1 :], key[:at] + key[at + 1 :], key[:at] + key[at + 1] + key[at] + key[at + 2 :]]
    assert all(nearest_key(written, (key,)) == key for written in wrong)
