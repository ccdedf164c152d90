"""Compiled kernels that are kept in files: never confused, never damaged, and optional."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba")

import numba
from sarathi_pp_kernels.cpu import attention_decode, attention_decode_simd, attention_prefill, gemm, row_ops
from sarathi_pp_kernels.cpu.simd import cache as caches
from sarathi_pp_kernels.cpu.simd import compile as compiling
from sarathi_pp_kernels.cpu.simd.compile import compiled, identity_of, inlined

from tests.kernels.cpu.kernel_cache_states import FACTORS, forked, make, operations_of, run, use
from tests.machine import patient

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), pytest.param(("--full",), marks=pytest.mark.full)])
def test_a_crash_or_damage_at_any_place_changes_no_kernel(options, tmp_path) -> None:
    """States are each prefix of a killed or full-disk writer, next to another writer, and each kind of damaged file."""
    command = (sys.executable, "-m", "tests.kernels.cpu.kernel_cache_states", str(tmp_path), *options)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(880))
    states = done.stdout.splitlines()
    assert done.returncode == 0 and len(states) >= 20, done.stderr
    assert [state for state in states if not state.endswith(" ok")] == [], done.stderr[-2000:]


def test_two_writers_touch_no_file_of_each_other(tmp_path) -> None:
    """In every order of their operations, each then sees the same files as alone."""
    touched = [{path for path in operations_of(tmp_path / "one", factor) if Path(path).suffix} for factor in FACTORS]
    assert all(touched) and not touched[0] & touched[1]


def test_no_two_kernels_have_one_file() -> None:
    shapes = itertools.product((32, 64, 128), (1, 4), (16, 32))
    products = [one for name, one in vars(gemm).items() if name.startswith("multiply_") and hasattr(one, "_cache")]
    kernels = [*row_ops.BFLOAT16, *row_ops.FLOAT32, *products, gemm.lay_out, attention_prefill.attend]
    for head_dim, group, page_size in shapes:
        kernels += [attention_decode.compile_kernel(kind, head_dim, head_dim, group, page_size) for kind in (0, 1, 2)]
        kernels.append(attention_decode_simd.compile_kernel(head_dim, group, page_size))
    described = ("a", "+avx2"), ("b", "+avx2"), ("a", "+avx2,+avx512f")
    processors = [SimpleNamespace(magic_tuple=lambda one=one: ("linux", *one)) for one in described]
    paths = [kernel._cache._path(kernel._cache._digest("()", one)) for kernel in kernels for one in processors]
    assert len(set(paths)) == len(paths) == 3 * (17 + 12 * 4)
    assert len({kernel.__name__ for kernel in kernels}) == len(kernels), "a symbol each"


_SOURCE = """
import sys
from sarathi_pp_kernels.cpu.simd.compile import compiled
{above}
@compiled({options})
def change(a):
    return {body}
print(change(10.0), sum(change.stats.cache_hits.values()))
"""


def test_whatever_decides_the_code_decides_the_file(tmp_path) -> None:
    """The name depends on the source, constants and settings. The file's modification time does not matter."""
    script, printed = tmp_path / "kernel.py", tmp_path / "printed"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(body: str = "a + N", above: str = "N = 1", options: str = "", **settings: str) -> tuple[float, int]:
        script.write_text(_SOURCE.format(above=above, body=body, options=options))
        os.utime(script, (1e9, 1e9))

        def work() -> None:
            use(tmp_path / "cache")
            with printed.open("w") as file, redirect_stdout(file):
                runpy.run_path(str(script), run_name="__main__")

        if settings:
            command = [sys.executable, str(script)]
            with printed.open("w") as file:
                subprocess.run(command, env={**environment, **settings}, stdout=file, check=True)
        else:
            assert forked(work) == 0  # Python and numba have started
        found, hits = printed.read_text().split()
        return float(found), int(hits)

    numba.njit(lambda x: x)(1.0)  # prepares the compiler once for all forks
    assert [run(), run()] == [(11, 0), (11, 1)]
    assert run(above="N = 2") == (12, 0)
    assert run(body="a - N") == (9, 0)
    assert run(options="boundscheck=True") == (11, 0)
    assert run(NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="") == (11, 0)
    assert [run(), run(above="N = 2"), run(body="a - N")] == [(11, 1), (12, 1), (9, 1)], "none has replaced another"


def test_a_change_of_a_lane_or_a_version_changes_every_kernel(monkeypatch) -> None:
    def add(a, b):
        return a + b

    before = identity_of(add, {})
    assert before == identity_of(add, {})
    monkeypatch.setattr(compiling.llvmlite, "__version__", "0.0")
    assert identity_of(add, {}) != before
    monkeypatch.undo()
    for module in sorted(Path(compiling.__file__).parent.glob("*.py")):
        own = compiling._digest_of
        monkeypatch.setattr(compiling, "_digest_of", lambda file: own(file) + b"x" * (file == module))  # noqa: B023
        assert identity_of(add, {}) != before, module
        monkeypatch.undo()


def test_a_function_inside_a_function_is_told_by_what_it_closes_over() -> None:
    def kernel_of(size: int, of_other_module: object = None) -> object:
        @inlined
        def inner(a):
            return a + size

        def kernel(a):
            return inner(a) if of_other_module is None else a

        return kernel

    assert identity_of(kernel_of(1), {}) == identity_of(kernel_of(1), {}) != identity_of(kernel_of(2), {})
    assert identity_of(kernel_of(1), {}) is not None and identity_of(kernel_of(object()), {}) is None
    assert identity_of(kernel_of(1, lambda a: a), {}) is not None
    assert identity_of(kernel_of(1, _made_elsewhere()), {}) is None


def _made_elsewhere() -> object:
    """Return a function inside a function of another module, whose constants the identity does not have."""
    namespace: dict[str, object] = {"__name__": "elsewhere"}
    exec("def make():\n    def inner(a):\n        return a\n    return inner", namespace)
    return namespace["make"]()  # type: ignore[operator]


def test_a_value_that_no_text_can_tell_is_not_kept() -> None:
    table = object()

    def look(a):
        return a if table is None else a + 1

    assert identity_of(look, {}) is None


def test_a_function_without_a_file_is_compiled_at_each_start() -> None:
    namespace: dict[str, object] = {"__name__": "nowhere"}
    exec("def add(a, b):\n    return a + b", namespace)
    assert compiled()(namespace["add"])(2, 3) == 5


@pytest.mark.parametrize("broken", ["read_bytes", "write_bytes", "mkdir"])
def test_what_cannot_be_read_or_written_costs_a_compilation_and_one_warning(
    broken, folder, monkeypatch, caplog
) -> None:
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    kernel = make(5.0)
    monkeypatch.setattr(Path, broken, refuse)
    with caplog.at_level(logging.WARNING, caches.__name__):
        assert kernel(2.0) == 10.0 and kernel(2) == 10
    assert len(caplog.records) == 1 and "Permission denied" in caplog.text and "scale_" in caplog.text


@pytest.mark.parametrize("failure", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_will_do(failure, folder, monkeypatch) -> None:
    def refuse(descriptor, how):
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(caches.fcntl, "flock", refuse)
    run()
    assert len(list(folder.rglob("*.kernel"))) == len(FACTORS)


def test_one_process_compiles_and_the_others_wait(folder) -> None:
    """Six start at once with an empty cache: five find the kernel that the first one compiled."""
    compilations, gate = folder / "compilations", os.pipe()

    def start() -> None:
        os.close(gate[1])
        os.read(gate[0], 1)  # until all are there
        kernel = make(2.0)
        assert kernel(1.5) == 3.0
        with open(compilations, "a") as file:
            file.write(f"{sum(kernel.stats.cache_misses.values())}\n")

    children = []
    for _ in range(6):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                use(folder / "cache")
                start()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(gate[0])
    os.close(gate[1])
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 6
    assert sorted(compilations.read_text().split()) == ["0"] * 5 + ["1"]
    left = {path.suffix for path in (folder / "cache").rglob("*") if path.is_file()}
    assert left == {".kernel"}, "locks and partial files are gone"


def test_a_process_that_has_waited_too_long_compiles_too(folder, monkeypatch) -> None:
    monkeypatch.setattr(caches, "_MOST_LOOKS", 2)
    monkeypatch.setattr(caches, "_LOOK_EVERY_S", 0.001)
    holder, waiter = make(2.0), make(2.0)
    path = holder._cache._path(b"\0" * 32)
    assert holder._cache._wait_for_lock(path)
    assert not waiter._cache._wait_for_lock(path)
    holder._cache._release()
    assert waiter._cache._wait_for_lock(path)
    waiter._cache._release()


def test_a_lock_goes_with_the_process_that_held_it(folder) -> None:
    kernel = make(2.0)
    path = kernel._cache._path(b"\0" * 32)
    assert forked(lambda: os._exit(0 if kernel._cache._wait_for_lock(path) else 3)) == 0
    assert kernel._cache._wait_for_lock(path)
    kernel._cache._release()


def test_a_compilation_that_fails_leaves_no_lock(folder) -> None:
    @compiled()
    def wrong(a):
        return a + "text"

    with pytest.raises(numba.TypingError):
        wrong(1)
    assert wrong._cache._lock is None or wrong._cache._release() is None
    assert not list(folder.rglob("*.lock"))
