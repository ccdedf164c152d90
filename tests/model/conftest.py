from __future__ import annotations

import pytest

from sarathi_pp.model.fuse import head_linear, packed_embedding, packed_experts, rewrite


@pytest.fixture
def plain_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers stay those of torch, so that a test can read their weights."""
    for module in (rewrite, packed_embedding, packed_experts):
        monkeypatch.setattr(module, "packed_class", lambda linear, compute: None)
    monkeypatch.setattr(head_linear, "has_float_gemm", lambda: False)
