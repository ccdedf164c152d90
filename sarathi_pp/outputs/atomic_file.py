"""Files that exist completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from sarathi_pp.errors import OutputError


def atomic_write(path: Path, text: str, *, replace: bool = True, synced: bool = True) -> None:
    """Write a file completely or not at all.

    Other threads and hosts may write the same path at the same moment.

    Args:
        replace: if several files are written to the path, the last one stays; if False, the first one. On file systems
            without hard links, two writers with False may both believe that they are the first.
        synced: let the file survive a loss of power. A busy disk may need seconds for this.

    Raises:
        OutputError: the file cannot be written.
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
    """Write a file's contents, or the names in a folder, to disk, if the file system can do this.

    Raises:
        OSError: the contents or names cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _linked(partial: Path, path: Path) -> bool:
    """Link a complete file to its final path, unless a file exists there.

    Return whether a file exists there now: an earlier one or this one. False means that links do not work here.
    """
    try:
        os.link(partial, path)
    except OSError:
        return path.exists()
    return True
