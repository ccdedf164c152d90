"""Checksums of weight files: their SHA-256 compared with the published one.

A safetensors file has no checksum of its tensors, so a flipped bit would go unnoticed. The published SHA-256 comes from
one of three places: the name of a blob in the hub's cache, the hub downloader's note next to the file, or SHA256SUMS in
the model directory (`sha256sum *.safetensors > SHA256SUMS`).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from sarathi_pp.checkpoint.files import open_checkpoint, safe_path
from sarathi_pp.errors import InputError, MissingError

SUMS_FILE = "SHA256SUMS"
_SUM = re.compile(r"[0-9a-f]{64}")


def verify_checksums(directory: Path) -> None:
    """Read every weight file of the model and compare its checksum.

    Raises:
        InputError: a file differs from its checksum, cannot be read or is not well-formed safetensors.
        MissingError: no checksum of a file is known.
    """
    listed = _listed_sums(directory)
    for name in open_checkpoint(directory).headers:
        file = safe_path(directory, name)
        expected = listed.get(name) or _noted_sum(directory, name, file)
        if expected is None:
            raise MissingError(
                f"--verify: no SHA-256 of {name} is known; if the file is good, store its checksum with "
                f"`cd {directory} && sha256sum *.safetensors > {SUMS_FILE}`"
            )
        try:
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"{directory / name} cannot be read: {error.strerror}") from error
        if found != expected:
            raise InputError(f"{directory / name} is damaged: SHA-256 {found}, expected {expected}; download it again")


def _listed_sums(directory: Path) -> dict[str, str]:
    """Return the checksums in SHA256SUMS by file name. A line has the sum, two other characters and the name."""
    try:
        lines = (directory / SUMS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{directory / SUMS_FILE} cannot be read: {error}") from error
    return {line[66:]: line[:64] for line in lines if _SUM.fullmatch(line[:64])}


def _noted_sum(directory: Path, name: str, file: Path) -> str | None:
    """Return the checksum that the Hub's client has stored; None if there is none.

    It is the name of the file in the client's cache, or the second line of a note that the client has written next to
    the file (revision, etag and time, one per line).
    """
    if _SUM.fullmatch(file.name):
        return file.name
    try:
        lines = (directory / ".cache/huggingface/download" / f"{name}.metadata").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[1] if len(lines) > 1 and _SUM.fullmatch(lines[1]) else None
