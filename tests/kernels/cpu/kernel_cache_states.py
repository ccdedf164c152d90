"""States of the kernel cache that crashes leave, and kernel runs from each state in a fresh process.

    python -m tests.kernels.cpu.kernel_cache_states FOLDER [--full]

prints one line per state: its name and "ok", or the failure. One process imports numba and forks for each writer and
reader, so that a state costs tenths of a second.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from hashlib import sha256
from itertools import product
from pathlib import Path

import numba
from sarathi_pp_kernels.cpu.simd.compile import compiled

FACTORS = (2.0, 3.0)
KILLED = 9
NO_SPACE = OSError(28, "No space left on device")


def make(factor: float):
    @compiled()
    def scale(x):
        return x * factor

    return scale


def run(factors=FACTORS) -> None:
    """Run the kernels and compare each with its reference."""
    for factor in factors:
        found = make(factor)(7.0)
        assert found == 7.0 * factor, f"the kernel of {factor} gave {found}"


def forked(work: Callable[[], object]) -> int:
    """Run the work in a forked process. Return its exit code: 0, or 1 for an exception."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Operations:
    """A counter of this process's operations on files below a folder.

    It kills the process, or raises, at one of them.
    """

    def __init__(self, folder: Path, at: int, error: OSError | None) -> None:
        self.paths: list[str] = []
        self._folder, self._at, self._error = str(folder), at, error
        sys.addaudithook(self._saw)

    def _saw(self, event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not writes and event not in ("os.rename", "os.remove", "os.mkdir"):
            return
        if not str(arguments[0]).startswith(self._folder):
            return
        self.paths.append(str(arguments[0]))
        if len(self.paths) == self._at:
            if self._error is not None:
                raise self._error
            os._exit(KILLED)


def use(folder: Path) -> None:
    numba.config.CACHE_DIR = str(folder)


def operations_of(folder: Path, factor: float) -> list[str]:
    """Return the paths of the file operations of one whole writer."""
    reader, writer = os.pipe()

    def work() -> None:
        use(folder)
        seen = Operations(folder, 0, None)
        run((factor,))
        os.write(writer, "\n".join(seen.paths).encode())

    assert forked(work) == 0
    os.close(writer)
    with open(reader) as stream:
        return stream.read().split("\n")


def check(name: str, *works: Callable[[], object], last: tuple[int, ...] = (0,)) -> None:
    """Do the works in processes of their own, then run all kernels in a fresh one."""
    codes = [forked(work) for work in (*works, run)]
    wrong = codes[-1] != 0 or any(code not in last for code in codes[:-1])
    print(name, f"failed: {codes}" if wrong else "ok", flush=True)


def crashes(folder: Path, *, full: bool) -> None:
    """Yield each prefix of a writer's operations, before another writer.

    With `full`, also after it, and with keys swapped.
    """
    for factor, other in (FACTORS, FACTORS[::-1])[: 1 + full]:
        count = len(operations_of(folder / f"whole-{factor}", factor))
        for at, error, late in product(range(1, count + 1), (None, NO_SPACE), (False, True)[: 1 + full]):
            state = folder / f"crash-{factor}-{at}-{error is None}-{late}"
            use(state)

            def crash(state=state, at=at, error=error, factor=factor) -> None:
                Operations(state, at, error)
                run((factor,))

            def whole(other=other) -> None:
                run((other,))

            name = f"{'killed' if error is None else 'no space'} at operation {at} of {factor}"
            check(f"{name}, {late=}", *((whole, crash) if late else (crash, whole)), last=(0, KILLED))


def damages(folder: Path, *, full: bool) -> None:
    """Yield files cut at any place, changed, or with the content of another kernel."""
    whole = folder / "whole"
    use(whole)
    check("whole", run)
    first, second = sorted(whole.rglob("*.kernel"))
    content, other = first.read_bytes(), second.read_bytes()
    length = len(content)
    cuts, places = (0, 52, length // 2, length - 1), (25, 60, length - 1)
    if full:
        cuts, places = (*cuts, 1, 19, 20, 83, 84, 85), (*places, 0, 30, 100, length // 2)
    damaged = {f"cut at {at}": content[:at] for at in cuts}
    damaged |= {f"changed at {at}": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places}
    damaged |= {"of another kernel": other, "longer": content + b"x", "text": b"not a kernel at all"}
    for name, wrong in damaged.items():
        state = folder / f"damage-{name.replace(' ', '-')}"
        shutil.copytree(whole, state)
        file = state / first.relative_to(whole)
        file.write_bytes(wrong)
        use(state)
        check(name)
        repaired = file.read_bytes()
        if repaired[:52] != content[:52] or sha256(repaired[84:]).digest() != repaired[52:84]:
            print(f"{name} failed: it was not repaired", flush=True)


if __name__ == "__main__":
    numba.njit(lambda x: x)(1.0)  # prepares the compiler, which takes half a second, once for all forks
    every = "--full" in sys.argv
    crashes(Path(sys.argv[1]), full=every)
    damages(Path(sys.argv[1]), full=every)
