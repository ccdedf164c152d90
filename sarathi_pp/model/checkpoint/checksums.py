"""Are the weight files those that were published? Their SHA-256 against what is known of them.

A safetensors file says where its tensors lie, and nothing of what they hold: a flipped bit is a wrong model. A sum is
known where the hub's cache names its blobs by it, where the hub's downloader noted it beside the file, or where the
model directory has a SHA256SUMS (`sha256sum *.safetensors > SHA256SUMS`).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from sarathi_pp.errors import InputError, MissingError
from sarathi_pp.model.checkpoint.files import open_checkpoint, safe_path

SUMS_FILE = "SHA256SUMS"
_SUM = re.compile(r"[0-9a-f]{64}")


def verify_weights(directory: Path) -> None:
    """Reads every weight file of the model.

    Raises InputError where one is not what its sum says, MissingError where none is known; what `open_checkpoint`
    raises.
    """
    listed = _listed_sums(directory)
    for name in open_checkpoint(directory).headers:
        file = safe_path(directory, name)
        expected = listed.get(name) or _noted_sum(directory, name, file)
        if expected is None:
            raise MissingError(
                f"--verify: no SHA-256 of {name} is known; where the file is good, write it down with "
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
    """As sha256sum writes them: the sum, two characters, the name."""
    try:
        lines = (directory / SUMS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{directory / SUMS_FILE} cannot be read: {error}") from error
    return {line[66:]: line[:64] for line in lines if _SUM.fullmatch(line[:64])}


def _noted_sum(directory: Path, name: str, file: Path) -> str | None:
    """By the blob's own name, or by the second line of what the downloader notes: revision, etag, time."""
    if _SUM.fullmatch(file.name):
        return file.name
    try:
        lines = (directory / ".cache/huggingface/download" / f"{name}.metadata").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[1] if len(lines) > 1 and _SUM.fullmatch(lines[1]) else None
