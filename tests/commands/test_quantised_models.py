"""Checkpoints in the forms of DeepSeek, OpenAI, vLLM and Kimi, through the user's command with two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.quantised import answers, write_published
from tests.commands.processes import COMMAND, Files, run
from tests.model.families import VOCAB_SIZE

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("family", "form", "title"),
    [
        ("qwen3_moe", "fp8 blocks", "FP8, blocks of 32 x 32"),
        ("gpt_oss", "mxfp4", "MXFP4"),
        ("deepseek_v3", "packed int4 groups", "compressed-tensors, int4, groups of 16"),
        pytest.param("deepseek_v3", "fp8 blocks", "FP8, blocks of 32 x 32", marks=pytest.mark.full),
        pytest.param("llama", "packed int4 groups", "compressed-tensors, int4, groups of 16", marks=pytest.mark.full),
    ],
)
def test_generate_answers_as_transformers_does_with_the_floats(
    family: str, form: str, title: str, tmp_path: Path
) -> None:
    found, files = write_published(family, form, tmp_path), Files(tmp_path)
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in (3, 20, 45)]
    files.write_prompts(prompts)
    options = ("--stages", "2", "--max-new-tokens", "8", "--ignore-eos", "--chunk-size", "16")
    said = run((*COMMAND, *files.options(found.quantised, *options)), tmp_path).stderr
    assert files.tokens() == answers(found.reference, prompts, 8)
    assert f"\nweights are dequantised when they are loaded ({title})" in f"\n{said}"  # a note, not a warning
    assert json.loads((files.run / "run.json").read_text())["quantised"] == title
