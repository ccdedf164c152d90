"""Exit codes as a contract with schedulers: 75 exactly if an unchanged second start could end differently."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sarathi_pp import errors
from sarathi_pp.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_ROWS_FAILED, PeerLostError, SarathiError
from tests.faults.causes import CAUSES

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.what)
def test_75_is_for_what_another_start_can_mend(cause):
    assert (cause.code == PeerLostError.exit_code) == cause.helps


def test_every_code_has_a_cause():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SarathiError)]
    codes = {kind.exit_code for kind in kinds} | {EXIT_OK, EXIT_ROWS_FAILED, EXIT_INTERRUPTED}
    assert {cause.code for cause in CAUSES} == codes


def test_every_test_that_is_named_exists():
    for cause in CAUSES:
        file, _, function = cause.shown.partition("::")
        names = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if hasattr(node, "name")}
        assert function in names, cause


def test_what_schedulers_start_again_is_75_alone():
    script = (TESTS.parent / "launch" / "slurm.sbatch").read_text()
    assert str(PeerLostError.exit_code) in script
