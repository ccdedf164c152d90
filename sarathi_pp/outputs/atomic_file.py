"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from sarathi_pp.errors import OutputError


def atomic_write(path: Path, text: str, *, replace: bool = True, synced: bool = True) -> None:
    """Others may be writing it at the same moment, threads and hosts: the last one stays, without `replace` the first.

    synced: it survives a loss of power, for which a busy disk may take seconds. Raises OutputError. Where file systems
    have no hard links, two that write without `replace` may both believe to be the first.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        partial.write_text(text)
        if synced:
            sync(partial)
        if replace or not _linked(partial, path):
            partial.replace(path)
        if synced:
            sync(path.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def sync(path: str | Path) -> None:
    """Puts a file's contents, or the names in a folder, on disk, where the file system can. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _linked(partial: Path, path: Path) -> bool:
    """Whether there is a file now: the one that was there, or else this one."""
    try:
        os.link(partial, path)
    except OSError:
        return path.exists()
    return True
