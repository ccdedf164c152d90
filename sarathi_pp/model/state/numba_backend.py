"""The operations of layers with a state on CPU, with compiled kernels.

The rows of a span are computed one after the other, and the heads or channels are divided among the threads. So every
row has the same bits whatever cut of its prompt, whatever other sequences and whatever number of threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sarathi_pp_kernels.cpu import convolution, delta_rule, selective_scan
from torch import Tensor

from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.state.backend import Convolution, DeltaRule, SelectiveScan


class NumbaState:
    """The operations by kernels, in float32 or bfloat16. All widths are multiples of 16. See StateBackend."""

    name = "numba"

    def __init__(self) -> None:
        self._table: tuple[StageInputs, NDArray[np.int64]] | None = None

    def convolve(self, x: Tensor, conv: Convolution, latest: Tensor, inputs: StageInputs) -> Tensor:
        """See StateBackend. Sums are float32, and are rounded before SiLU."""
        spans = self._spans(inputs, len(x), len(latest))
        return convolution.convolve(x, conv.weights, conv.bias, latest, spans, silu=conv.silu)

    def apply_delta_rule(
        self, rows: Tensor, gates: Tensor, rule: DeltaRule, states: Tensor, inputs: StageInputs
    ) -> Tensor:
        """See StateBackend."""
        spans = self._spans(inputs, len(rows), len(states))
        gating = rule.rates, rule.gate_bias
        return delta_rule.apply_delta_rule(rows, gates, *gating, states, spans, rule.key_heads, rule.value_dim)

    def scan(self, rows: Tensor, steps: Tensor, scan: SelectiveScan, states: Tensor, inputs: StageInputs) -> Tensor:
        """See StateBackend. The steps dt are rounded to the dtype of the rows, and all else is float32."""
        spans = self._spans(inputs, len(rows), len(states))
        of_heads = scan.rates, scan.step_bias, scan.skips
        return selective_scan.scan(rows, steps, *of_heads, states, spans, scan.groups)

    def _spans(self, inputs: StageInputs, num_rows: int, num_slots: int) -> NDArray[np.int64]:
        """Return the spans as the kernels read them. They are kept, because all layers need the same ones."""
        if self._table is None or self._table[0] is not inputs:
            table = [(span.first_row, span.num_tokens, span.start, span.slot) for span in inputs.spans]
            self._table = inputs, np.array(table, np.int64).reshape(-1, 4)
        spans = self._table[1]
        assert spans[:, 1].sum() == num_rows, f"spans have {spans[:, 1].sum()} of {num_rows} rows"
        slots = spans[:, 3]
        assert not len(slots) or 0 <= slots.min() <= slots.max() < num_slots, f"slots {slots} of {num_slots}"
        return spans
