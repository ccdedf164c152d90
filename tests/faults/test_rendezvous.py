"""torchrun's elastic rendezvous over a store that outlives the jobs that meet in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.runtime.processes import Files, console_script, environment, torchrun

pytestmark = pytest.mark.timeout(200)


def generate(files: Files, model: Path, port: int, job: str, *options: str) -> tuple[int, str]:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job)
    front = torchrun(2, console_script(files.folder), "--nnodes", "1", "--local-addr", "127.0.0.1", *rendezvous)
    done = subprocess.run(
        (*front, *files.options(model, "--quiet", "--max-new-tokens", "4", *options)),
        cwd=files.folder, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_rendezvous_id_that_was_used_before_is_refused_and_a_new_one_runs(model, tmp_path):
    """torchrun itself refuses it, before a rank of ours is started: nothing of the earlier job is touched."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files = Files(tmp_path)
    files.write_prompts([(5, 6), (7,), (8, 9, 10)])
    code, said = generate(files, model, store.port, "first")
    assert code == 0, said
    written = files.output.read_bytes()
    code, said = generate(files, model, store.port, "first", "--overwrite")
    assert code == 1 and "RendezvousClosedError" in said
    assert files.output.read_bytes() == written
    code, said = generate(files, model, store.port, "second", "--overwrite")
    assert code == 0, said
    assert (files.exit_code(), len(files.output.read_text().splitlines())) == (0, 3)
