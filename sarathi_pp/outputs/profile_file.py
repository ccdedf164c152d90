"""Read and write the file profile.json, the measured cost model of a model on a machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.errors import ConfigError, InputError, MissingError, OutputError
from sarathi_pp.outputs.atomic_file import atomic_write


def read_profile(path: Path) -> Profile:
    """Return the profile in a file.

    Raises:
        MissingError: the file cannot be read.
        InputError: its contents are wrong. The message names the error.
    """
    try:
        return Profile.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise MissingError(f"cannot read the profile {path}: {error.strerror}") from None
    except (ValueError, InputError) as error:
        raise InputError(f"{path}: {error}") from None


def check_profile_output(path: Path, *, overwrite: bool) -> None:
    """Raise if the file of a profile cannot be written, before anything is loaded.

    Raises:
        ConfigError: the path is a directory, or the file exists and `overwrite` is False.
        OutputError: its folder cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"--output {path} is a directory; name a file")
    if path.exists() and not overwrite:
        raise ConfigError(f"--output {path} exists; name another file, or replace it with --overwrite")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"--output {path}: {folder} is not a directory that can be written to")


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile completely or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    atomic_write(path, json.dumps(profile.to_json(), indent=2) + "\n")
