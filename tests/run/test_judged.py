"""A start that fails before its first microbatch is done, after an earlier start that failed in the same way."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import MemoryLostError, PeerLostError, StalledError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run.ending import Ending


def ended_with(folder, attempt, error):
    run_dir = RunDirectory(folder, attempt)
    run_dir.make(run_dir.attempt_path)
    Ending(RankEnvironment(), RunConfig(model="m"), Mock(), run_dir).judge(error)
    return error.exit_code, str(error)


@pytest.mark.parametrize("kind", [MemoryLostError, StalledError])
def test_what_fails_at_the_start_again_is_no_75_any_more(kind, tmp_path):
    assert ended_with(tmp_path, 0, kind("first", at_start=True)) == (75, "first")
    code, said = ended_with(tmp_path, 1, kind("second", at_start=True))
    assert code == 2 and said == "second. The previous start ended in the same way, so another one will not help"


@pytest.mark.parametrize("between", [PeerLostError("killed"), MemoryLostError("later"), StalledError("later")])
def test_a_start_that_got_further_counts_anew(between, tmp_path):
    assert ended_with(tmp_path, 0, StalledError("first", at_start=True))[0] == 75
    assert ended_with(tmp_path, 1, between)[0] == 75
    assert ended_with(tmp_path, 2, StalledError("third", at_start=True))[0] == 75


def test_a_rank_that_knows_no_run_directory_yet_says_75():
    error = StalledError("early", at_start=True)
    Ending(RankEnvironment(), RunConfig(model="m"), Mock()).judge(error)
    assert error.exit_code == 75
