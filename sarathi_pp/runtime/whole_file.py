"""Files that are there whole or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path

from sarathi_pp.errors import OutputError


def write_whole(path: Path, text: str) -> None:
    """Raises OutputError. Others may be writing it at the same moment, threads and hosts: one of them is the last."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
