"""Each layer's attention is described once, and may not change later."""

from __future__ import annotations

import pytest
import torch

from sarathi_pp.model.attention.spec import AttentionSpecs

SINKS = torch.zeros(2)


def test_a_layers_spec_is_made_in_its_first_call() -> None:
    specs = AttentionSpecs((None, 7))
    first, second = specs.of(0, 0.5, None, None), specs.of(1, 0.25, 30.0, SINKS)
    assert (first.scaling, first.sliding_window, first.softcap, first.sinks) == (0.5, None, None, None)
    assert (second.scaling, second.sliding_window, second.softcap) == (0.25, 7, 30.0) and second.sinks is SINKS
    assert specs.of(0, 0.5, None, None) is first and specs.of(1, 0.25, 30.0, SINKS) is second


@pytest.mark.parametrize("changed", [(0.5, 30.0, SINKS), (0.25, None, SINKS), (0.25, 30.0, SINKS.clone())])
def test_a_layer_may_not_pass_other_values_later(changed: tuple[float, float | None, torch.Tensor]) -> None:
    specs = AttentionSpecs((None,))
    specs.of(0, 0.25, 30.0, SINKS)
    with pytest.raises(AssertionError, match="layer 0 has changed"):
        specs.of(0, *changed)
