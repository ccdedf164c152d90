"""profile.json, read from a file and written to one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.errors import ConfigError, InputError, MissingError, OutputError
from sarathi_pp.outputs.atomic_file import atomic_write


def read_profile(path: Path) -> Profile:
    """Raises MissingError where there is no such file, InputError naming what is wrong in it."""
    try:
        return Profile.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise MissingError(f"cannot read the profile {path}: {error.strerror}") from None
    except (ValueError, InputError) as error:
        raise InputError(f"{path}: {error}") from None


def check_profile_output(path: Path, *, overwrite: bool) -> None:
    """Refuses a file that cannot be written, before anything is loaded. Raises ConfigError or OutputError."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a directory; name a file")
    if path.exists() and not overwrite:
        raise ConfigError(f"--output {path} exists; name another file, or replace it with --overwrite")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"--output {path}: {folder} is no directory that can be written to")


def write_profile(path: Path, profile: Profile) -> None:
    """Whole or not at all. Raises OutputError."""
    atomic_write(path, json.dumps(profile.to_json(), indent=2) + "\n")
