"""A command inside a real cgroup, if this machine allows one; tests/process/test_host.py covers all kinds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, environment
from tests.machine import patient

pytestmark = pytest.mark.timeout(120)

MOUNTED = Path("/sys/fs/cgroup")
MIB = 1 << 20
LIMIT_MIB = 1536


@contextmanager
def group(folder: Path, **settings: str) -> Iterator[Path]:
    """Make a cgroup with these settings, dots as double underscores; yield the file that takes processes."""
    own = folder / f"sarathi-pp-test-{os.getpid()}"
    own.mkdir()
    try:
        for name, value in settings.items():
            (own / name.replace("__", ".", 1)).write_text(value)
        yield own / "cgroup.procs"
    finally:
        own.rmdir()


@pytest.fixture
def inside() -> Iterator[tuple[str, ...]]:
    """Return the words that run a command with 1.5 GiB of memory and 1.5 CPUs."""
    with ExitStack() as stack:
        try:
            if (MOUNTED / "memory").is_dir():
                memory = group(MOUNTED / "memory", memory__limit_in_bytes=str(LIMIT_MIB * MIB))
                cpu = group(MOUNTED / "cpu", cpu__cfs_period_us="100000", cpu__cfs_quota_us="150000")
                files = [stack.enter_context(memory), stack.enter_context(cpu)]
            else:
                limits = {"memory__max": str(LIMIT_MIB * MIB), "cpu__max": "150000 100000"}
                files = [stack.enter_context(group(MOUNTED, **limits))]
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        join = "".join(f"echo $$ > {file} && " for file in files)
        yield ("sh", "-c", f'{join}exec "$0" "$@"')


def test_budgets_and_threads_are_of_the_cgroup(inside: tuple[str, ...]) -> None:
    """The quota of 1.5 CPUs gives two threads; the host may have more CPUs and more memory."""
    variables = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    command = (*inside, *COMMAND, "doctor", "--json")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one["detail"] for one in json.loads(done.stdout)["findings"] if one["topic"] == "host"}
    cpus = len(os.sched_getaffinity(0))
    assert f"threads: {min(cpus, 2)} for a single stage, 1 for each of two stages" in found["cores"]
    assert (", of which a cgroup allows 1.5;" in found["cores"]) == (cpus > 1.5)
    numbers = re.fullmatch(
        r"([\d.]+) GiB free in the memory of cgroup \S+; KV pages and states of a stage get ([\d.]+) GiB",
        found["memory"],
    )
    assert numbers is not None, found["memory"]
    free_gib, budget_gib = map(float, numbers.groups())
    assert 0.3 < free_gib < LIMIT_MIB / 1024 and budget_gib == pytest.approx(0.4 * free_gib, rel=0.05)
