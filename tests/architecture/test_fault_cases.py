"""The list of cases is complete, and everything that it names exists."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.faults.cases import CASES

TESTS = Path(__file__).parents[1]


def test_every_case_is_listed_once() -> None:
    assert sorted(CASES) == list(range(1, len(CASES) + 1))


def test_every_test_that_is_named_exists() -> None:
    functions: dict[str, set[str]] = {}
    missing = []
    for number, (_, tests) in CASES.items():
        for name in tests:
            file, _, function = name.partition("::")
            if file not in functions:
                tree = ast.parse((TESTS / file).read_text())
                functions[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            if function not in functions[file]:
                missing.append((number, name))
    assert not missing
