"""`generate` on a GPU gives the tokens that it gives on the CPU, in float32.

The model ends its answers itself. Until then the two best logits differ by more than 7 in each prompt, so rounding does
not choose a token. After that they may differ by 0.01.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, ROOT, Files, environment
from tests.machine import patient

MODEL = ROOT / "examples" / "tiny-adder"
PROMPTS = [json.loads(line)["prompt"] for line in (ROOT / "examples" / "prompts.jsonl").read_text().splitlines()]
DEVICE = "cuda"
NEW_TOKENS = 16
# Seconds of one process. A test has up to two.
LIMIT_S = 55
pytestmark = pytest.mark.timeout(120)


def answers(folder: Path, *options: str) -> list[tuple[int, ...]]:
    folder.mkdir(parents=True)
    files = Files(folder)
    files.input.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    common = ("--dtype", "float32", "--max-new-tokens", str(NEW_TOKENS), "--quiet")
    command = (*COMMAND, *files.options(MODEL, "--kv-cache-memory", "256MiB", *common, *options))
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=patient(LIMIT_S), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return files.tokens()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    return answers(tmp_path_factory.mktemp("cpu") / "run", "--device", "cpu", "--attention", "sdpa")


@pytest.mark.parametrize(
    "options",
    [(), ("--enforce-eager",), ("--attention", "sdpa"), ("--stages", "2"), ("--stages", "4")],
    ids=lambda options: " ".join(options) or "graphs",
)
def test_tokens_are_those_of_the_cpu(options: tuple[str, ...], on_cpu: list[tuple[int, ...]], tmp_path: Path) -> None:
    found = answers(tmp_path / "run", "--device", DEVICE, *options)
    assert len(found) == len(PROMPTS) and found == on_cpu
