"""Known GPUs: the reference for scaling speeds, and the order of the others."""

from __future__ import annotations

import pytest

from sarathi_pp.core.cost.cards import CARDS
from sarathi_pp.core.cost.estimate import DEVICE_SPEEDS


def test_an_a100_has_the_speed_that_others_are_scaled_from() -> None:
    speed, known = CARDS["a100-80g"].speed, DEVICE_SPEEDS["cuda"]
    assert speed.sums is not None and known.sums is not None
    assert (speed.flops, speed.bytes_per_s) == (pytest.approx(dict(known.flops)), pytest.approx(known.bytes_per_s))
    assert speed.sums.bytes_per_s == pytest.approx(known.sums.bytes_per_s)


@pytest.mark.parametrize(("slower", "faster"), [("l4", "rtx-4090"), ("rtx-4090", "h100-80g"), ("h100-80g", "b200")])
def test_a_faster_card_is_faster_in_all(slower: str, faster: str) -> None:
    one, other = CARDS[slower].speed, CARDS[faster].speed
    assert one.flops[2] < other.flops[2] and one.bytes_per_s < other.bytes_per_s
    assert one.sums is not None and other.sums is not None and one.sums.bytes_per_s <= other.sums.bytes_per_s
