from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_pp.errors import ConfigError, OutputError
from sarathi_pp.outputs.profile_file import check_profile_output, read_profile, write_profile
from tests.core.cost.test_profile import PROFILE


def test_a_profile_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputError, match="cannot write"):
        write_profile(tmp_path / "none" / "profile.json", PROFILE)


def test_what_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    check_profile_output(path, overwrite=False)
    path.write_text("dear figures")
    with pytest.raises(ConfigError, match="exists; .*--overwrite"):
        check_profile_output(path, overwrite=False)
    check_profile_output(path, overwrite=True)
    assert path.read_text() == "dear figures"
    with pytest.raises(ConfigError, match="is a directory"):
        check_profile_output(tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="not a directory"):
        check_profile_output(tmp_path / "none" / "profile.json", overwrite=False)
