"""The files that hold compiled kernels: one file per kernel, signature and processor, checked when it is loaded.

    identity + signature + processor -> digest -> attend-<digest>.kernel: magic | digest | sha256 of the code | code

numba's own cache keeps all kernels of one name in an index and numbered files. If two writers collide, or a writer
stops between its two writes, it gives one kernel the code of another. Here the name of a file contains a digest of all
that decides its code. A file is written under another name and then renamed. If a file cannot be used, the kernel is
compiled again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, _Cache
from numba.core.serialize import dumps

_log = logging.getLogger(__name__)

_MAGIC = b"sarathi-pp kernel 1\n"
_LOOK_EVERY_S = 0.05
# Looks at the lock of another process, five minutes in all. The longest compilation takes some ten seconds. A process
# that has waited longer compiles too.
_MOST_LOOKS = 6000


class KernelCache(_Cache):  # type: ignore[misc]
    """The cache of one kernel's machine code, in files.

    numba reads it before it compiles the kernel, and writes the code that it has compiled. On a host, only one process
    compiles a kernel at a time, if files can be locked. The others wait for its code.
    """

    def __init__(self, function: Any, identity: bytes) -> None:
        """Choose the folder in which numba would keep the function's code.

        Args:
            identity: a digest of all that decides the code, except its signature and the processor.

        Raises:
            RuntimeError: numba finds no folder to which it can write.
        """
        self._serializer = CompileResultCacheImpl(function)
        self._folder = Path(self._serializer.locator.get_cache_path())
        self._name = function.__name__
        self._identity = identity
        self._lock: tuple[Path, int] | None = None
        self._warned = False

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def enable(self) -> None:
        """Do nothing. numba's interface requires this method."""

    def disable(self) -> None:
        """Do nothing. numba's interface requires this method."""

    def flush(self) -> None:
        """Do nothing: a file is never out of date, since its name identifies its content."""

    def load_overload(self, sig: Any, target_context: Any) -> Any | None:
        """Return the compiled kernel for a signature, or None if this process has to compile it."""
        target_context.refresh()
        digest = self._digest(sig, target_context.codegen())
        found = self._load(digest, target_context)
        if found is None and self._wait_for_lock(self._path(digest)):
            found = self._load(digest, target_context)
            if found is not None:
                self._release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the compiled kernel for a signature to its file. If that fails, only warn."""
        try:
            with self._optional("written"):
                if self._serializer.check_cachable(data):
                    self._save(self._digest(sig, data.codegen), dumps(self._serializer.reduce(data)))
        finally:
            self._release()

    def _digest(self, sig: Any, codegen: Any) -> bytes:
        return sha256(self._identity + repr((str(sig), codegen.magic_tuple())).encode()).digest()

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{self._name}-{digest.hex()}.kernel"

    def _save(self, digest: bytes, code: bytes) -> None:
        path = self._path(digest)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(_head(digest, code) + code)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        if self._lock is not None:  # no other process writes this kernel, so a killed one has left these
            for left in path.parent.glob(f"{path.stem}.*.partial"):
                left.unlink(missing_ok=True)

    def _load(self, digest: bytes, target_context: Any) -> Any | None:
        with self._optional("read"):
            try:
                content = self._path(digest).read_bytes()
            except FileNotFoundError:
                return None
            code = content[len(_head(digest, b"")) :]
            if content != _head(digest, code) + code:
                raise ValueError("the file is damaged")
            return self._serializer.rebuild(target_context, pickle.loads(code))
        return None

    def _wait_for_lock(self, path: Path) -> bool:
        """Wait until no other process compiles this kernel, and lock it, so that only this process compiles.

        Returns:
            True if it is locked. False if files cannot be locked here, or another process takes too long.
        """
        self._release()
        lock = path.with_suffix(".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        for _ in range(_MOST_LOOKS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                threading.Event().wait(_LOOK_EVERY_S)
                continue
            except OSError:  # a file system without locks
                break
            self._lock = lock, descriptor
            return True
        os.close(descriptor)
        return False

    def _release(self) -> None:
        """Unlock the kernel if this process has locked it, also after a compilation that has failed."""
        if self._lock is None:
            return
        (lock, descriptor), self._lock = self._lock, None
        with suppress(OSError):
            lock.unlink()  # waiting processes find the kernel, and later ones make another file
        os.close(descriptor)

    @contextmanager
    def _optional(self, done: str) -> Iterator[None]:
        """Suppress any error inside, after which the kernel is compiled again, and warn at the first one.

        Args:
            done: the attempt, for the warning: "read" or "written".
        """
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "the compiled kernel %s cannot be %s in %s and is compiled at each start: %s: %s",
                    *(self._name, done, self._folder, type(error).__name__, error),
                )


def _head(digest: bytes, code: bytes) -> bytes:
    return _MAGIC + digest + sha256(code).digest()
