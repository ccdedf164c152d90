"""`generate --weights stored` with simulated GPUs: tokens are those of transformers on dequantised weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.checkpoint.quantised import answers, write_published
from tests.commands.processes import COMMAND, Files
from tests.machine import patient
from tests.mockgpu.processes import with_gpus

FP8 = "fp8 blocks"
PROMPTS = [(3, 9, 4, 8, 5), (7, 6)]
FEW = ("--chunk-size", "7", "--max-num-seqs", "2", "--max-new-tokens", "3", "--ignore-eos")


@pytest.mark.parametrize(
    ("family", "form", "gpus", "options"),
    [
        ("qwen3_moe", FP8, 1, ("--attention", "sdpa")),
        pytest.param("llama", FP8, 2, ("--stages", "2"), marks=pytest.mark.full),
        pytest.param("llama", FP8, 2, ("--tensor-parallel-size", "2"), marks=pytest.mark.full),
        pytest.param("gpt_oss", "mxfp4", 2, ("--stages", "2"), marks=pytest.mark.full),
    ],
)
def test_generate(family: str, form: str, gpus: int, options: tuple[str, ...], tmp_path: Path) -> None:
    found, files = write_published(family, form, tmp_path), Files(tmp_path)
    files.write_prompts(PROMPTS)
    given = ("--device", "cuda", "--dtype", "float32", "--weights", "stored", *FEW, *options)
    hazards = tmp_path / "hazards"
    done = subprocess.run(
        (*COMMAND, *files.options(found.quantised, *given)),
        cwd=tmp_path,
        env=with_gpus(gpus, hazards),
        capture_output=True,
        text=True,
        timeout=patient(280),
    )
    assert not hazards.exists(), hazards.read_text()
    assert done.returncode == 0, done.stderr[-3000:]
    assert files.tokens() == answers(found.reference, PROMPTS, 3)
    assert "stay as stored on the GPU" in done.stderr and "weights are dequantised" not in done.stderr
    run = json.loads((files.run / "run.json").read_text())
    assert (run["weights"], run["quantised"]) == ("stored", {FP8: "FP8, blocks of 32 x 32"}.get(form, "MXFP4"))
