"""Attention with the heads of Llama-3-8B, as compiled."""

from __future__ import annotations

import pytest

from tests.gpu.attended import DECODES, FEW, MIXED, SMALL, Attended
from tests.gpu.comparison import F32, sized

LARGE, LITTLE = (32, 8, 128), (4, 2, 16)


@pytest.mark.parametrize(
    "attended",
    sized(
        [
            Attended("64 decodes", LARGE, DECODES),
            Attended("4 long decodes, which are split", LARGE, [(8000, 1)] * 4),
            Attended("chunk at 0", LARGE, [(0, 512)]),
            Attended("chunk at 4096", LARGE, [(4096, 512)]),
            Attended("chunk and 64 decodes", LARGE, MIXED),
            Attended("small ones", LARGE, SMALL),
            Attended("small ones, pages of 256", LARGE, SMALL, page_size=256),
            Attended("small ones, window, cap, sinks", LARGE, SMALL, window=100, softcap=30.0, sinks=True),
            Attended("pages far behind", LARGE, SMALL, least_pages=140_000),
            Attended("64 decodes", LARGE, DECODES, float8=True),
            Attended("chunk at 4096", LARGE, [(4096, 512)], float8=True),
            Attended("small ones, window, cap, sinks", LARGE, SMALL, F32, window=100, sinks=True, float8=True),
        ],
        tiny=[
            Attended("few", LITTLE, FEW, F32, least_pages=100),
            Attended("few, window, cap, sinks", LITTLE, FEW, F32, window=20, softcap=30.0, sinks=True),
            Attended("few", LITTLE, FEW, F32, float8=True),
        ],
    ),
    ids=str,
)
def test_microbatches(attended: Attended) -> None:
    attended.compare()
