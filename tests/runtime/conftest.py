from __future__ import annotations

from collections.abc import Callable

import pytest

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
