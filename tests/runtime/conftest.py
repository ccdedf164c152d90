from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest

from tests.runtime.processes import ROOT
from tests.runtime.references import Reference, make_reference

References = Callable[[str], Reference]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The reference answers of a family, computed once."""
    known: dict[str, Reference] = {}

    def answers(family: str) -> Reference:
        if family not in known:
            known[family] = make_reference(family, tmp_path_factory.mktemp(family))
        return known[family]

    return answers


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For as long as the test runs, no core of this machine goes to sleep."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "measure")
    with importlib.import_module("awake").awake():
        yield
