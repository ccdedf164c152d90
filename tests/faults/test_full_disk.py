"""A full disk ends a run with whole lines and 74; when space is free again, the run resumes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.processes import Files
from tests.faults.jobs import answers, num_lines, started
from tests.missing import missing

pytestmark = pytest.mark.timeout(200)

NUM_ROWS = 400
OPTIONS = ("--max-new-tokens", "24", "--ignore-eos", "--temperature", "0.8", "--dtype", "float32")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Mount a separate file system, of the size that `resize` gives it."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)), capture_output=True)
    if mounted.returncode:
        missing(f"mounting is not permitted here: {mounted.stderr.decode()}")
    yield path
    subprocess.run(("umount", "--lazy", str(path)), check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(("mount", "-o", f"remount,size={size}", str(disk)), check=True)


def prompts(files: Files) -> Files:
    files.write_prompts([tuple(range(3, 4 + row % 40)) for row in range(NUM_ROWS)])
    return files


# With the traces elsewhere, the answers find the disk full. Otherwise the first writer does: the last part of a trace
# may be written after the last answer.
@pytest.mark.parametrize(
    ("stages", "traces"),
    [
        ("2", "elsewhere"),
        ("1", "there"),
        pytest.param("1", "elsewhere", marks=pytest.mark.full),
        pytest.param("2", "there", marks=pytest.mark.full),
    ],
)
def test_a_full_disk_loses_nothing(traces, stages, disk, model, tmp_path):
    whole = prompts(Files(tmp_path))
    with started(whole, model, *OPTIONS) as run:
        assert run.end() == "" and run.process.returncode == 0
    expected = answers(whole)
    needed = whole.output.stat().st_size + (traces == "there") * whole.traces()[0].stat().st_size * int(stages)
    files = prompts(Files(disk))
    options = (*OPTIONS, "--stages", stages)
    if traces == "elsewhere":
        options = (*options, "--run-dir", str(tmp_path / "run"))
    resize(disk, f"{(files.input.stat().st_size + needed // 2) // 1024}k")
    with started(files, model, *options) as run:
        said = run.end()
        assert run.process.returncode == 74, said
        assert "No space left on device" in said and "Traceback" not in said
    assert 0 < num_lines(files.output) <= NUM_ROWS - (traces == "elsewhere")
    assert files.output.read_bytes().endswith(b"\n")
    resize(disk, "16m")
    with started(files, model, *options, "--resume") as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert answers(files) == expected
