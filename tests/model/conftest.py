from __future__ import annotations

import pytest

from sarathi_pp.model.fuse import rewrite


@pytest.fixture
def plain_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers stay those of torch, so that a test can read their weights."""
    monkeypatch.setattr(rewrite, "packed_class", lambda linear, compute: None)
