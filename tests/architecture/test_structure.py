"""The code keeps its structure: no package, folder or constructor grows too large."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.structure import (
    ROOT,
    callable_parameters,
    constructors,
    cycles,
    late_attributes,
    measure,
    modules,
)

MOST_SHARE = 0.16
MOST_FILES = 17
MOST_CONSTRUCTOR_LINES = 45
MOST_CALLABLES_PER_1000_LINES = 1.5


def test_no_package_and_no_folder_is_the_place_for_everything() -> None:
    found = measure(ROOT)
    assert found["largest_package_share"] <= MOST_SHARE, found["largest_package"]
    assert found["fullest_folder_files"] <= MOST_FILES, found["fullest_folder"]


def test_no_import_goes_in_a_circle() -> None:
    assert cycles(modules(ROOT)) == []


def test_objects_are_whole_when_they_are_made() -> None:
    assert late_attributes(modules(ROOT)) == []
    assert [place for size, place in constructors(modules(ROOT)) if size > MOST_CONSTRUCTOR_LINES] == []


def test_control_flow_is_plain_calls() -> None:
    """A function that gets functions hides its callees. A generator or an object with methods shows them."""
    assert measure(ROOT)["callable_parameters_per_1000_lines"] <= MOST_CALLABLES_PER_1000_LINES


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "a.py": "from collections.abc import Callable\nfrom sarathi_pp.part import b\nSay = Callable[[str], None]\n",
        "part/b.py": (
            "from sarathi_pp import a\n\n\nclass B:\n    def __init__(self, say: a.Say | None, n: int) -> None:\n"
            '        """Two\n        lines."""\n        self.n = n\n\n'
            "    def late(self, then: Say) -> None:\n        self.n = self.m = 1\n"
        ),
        "part/__init__.py": "",
        "__init__.py": "",
    }.items():
        path = tmp_path / "sarathi_pp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_is_counted(tree: Path) -> None:
    found = modules(tree)
    assert cycles(found) == [["sarathi_pp.a", "sarathi_pp.part.b"]]
    assert late_attributes(found) == ["sarathi_pp/part/b.py:11 B.m"]
    assert constructors(found) == [(2, "sarathi_pp/part/b.py B")]
    assert callable_parameters(found) == ["sarathi_pp/part/b.py:5 __init__(say)", "sarathi_pp/part/b.py:10 late(then)"]
    assert measure(tree)["largest_package"] == "sarathi_pp/part"
