"""These tests need a CUDA device. tests/mockgpu runs them too, in small sizes, so that they keep working."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_device = torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
