"""Attention with other numbers and sizes of heads, and other dtypes, as compiled."""

from __future__ import annotations

import pytest

from tests.gpu.attended import DECODES, MIXED, SMALL, Attended
from tests.gpu.comparison import F16, F32, sized


@pytest.mark.parametrize(
    "attended",
    sized(
        [
            Attended("small ones", (8, 4, 64), SMALL, F32),
            Attended("64 decodes", (8, 4, 64), DECODES, F32),
            Attended("chunk at 0", (8, 4, 64), [(0, 276)], F32),
            Attended("small ones, window, cap, sinks", (8, 4, 64), SMALL, F32, window=100, softcap=30.0, sinks=True),
            Attended("small ones", (4, 2, 16), SMALL, F32),
            Attended("small ones", (32, 8, 64), SMALL),
            Attended("chunk and 64 decodes", (32, 8, 64), MIXED),
            Attended("small ones", (28, 4, 128), SMALL),
            Attended("small ones", (8, 8, 128), SMALL),
            Attended("small ones, window, cap, sinks", (8, 4, 256), SMALL, window=100, softcap=30.0, sinks=True),
            Attended("small ones", (32, 8, 128), SMALL, F16),
        ],
        tiny=[Attended("one", (3, 1, 32), [(17, 2)], F32)],
    ),
    ids=str,
)
def test_microbatches(attended: Attended) -> None:
    attended.compare()
