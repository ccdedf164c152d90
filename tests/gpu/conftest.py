"""These tests need a CUDA device. tests/mockgpu runs them too, in small sizes, so that they keep working."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.comparison import TINY

HERE = Path(__file__).parent
# Seconds of one test with compilation. In Triton's interpreter a test may take longer.
LIMIT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_device = torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not TINY and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
