"""Values that are not finite end only the request that has them; the error names the stage where they started."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, Files, environment
from tests.machine import patient
from tests.model.families import write_checkpoint

pytestmark = pytest.mark.timeout(120)

POISON = 9
# Copies of the same prompts; one has the token with the non-finite embedding in its middle and one at its end.
CLEAN = [(3, 4, 5, 6), (5, 5, 5), (7, 8, 3, 4, 5), (4,), (6, 5, 4, 3, 3, 3)] * 6
POISONED = {2: (3, POISON, 5), 9: (7, 3, POISON), 17: (POISON,)}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def write_model(directory: Path) -> Path:
    """Write a family whose head is not its embedding: a tied one would have the bad token in every row of logits.

    The bad token's logit is 0, which is never the largest, so no output contains it on its own.
    """
    directory.mkdir()
    write_checkpoint("mistral", directory)
    spoil(directory, "lm_head.weight", POISON, 0.0)
    return directory


def spoil(model: Path, name: str, row: int | None, value: float) -> None:
    """Overwrite a float32 tensor of the checkpoint, or one row of it, in the file."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])[name]
    assert entry["dtype"] == "F32"
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    if row is not None:
        width = (end - begin) // entry["shape"][0]
        begin, end = begin + row * width, begin + (row + 1) * width
    data[begin:end] = struct.pack("<f", value) * ((end - begin) // 4)
    path.write_bytes(data)


def generate(files: Files, model: Path, *options: str) -> list[dict]:
    command = (*COMMAND, *files.options(model, "--quiet", "--overwrite", "--max-new-tokens", "8", "--ignore-eos"))
    done = subprocess.run(
        (*command, "--dtype", "float32", *options),
        cwd=files.folder, env=environment(), capture_output=True, text=True, timeout=patient(100),
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    return files.rows()


def tokens(rows: list[dict]) -> dict[str, list[int]]:
    return {row["id"]: row["token_ids"] for row in rows if "error" not in row}


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.full)])
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_the_neighbours_are_unharmed(value, stages, model, tmp_path):
    """The pool holds only a few sequences, so other requests get the pages that a bad request has filled."""
    files = Files(tmp_path)
    few = ("--stages", stages, "--max-num-seqs", "4", "--max-model-len", "16", "--kv-cache-memory", "64KiB")
    files.write_prompts(CLEAN)
    expected = tokens(generate(files, model, *few))
    spoil(model, "model.embed_tokens.weight", POISON, value)
    mixed = [POISONED.get(place, prompt) for place, prompt in enumerate(CLEAN)]
    files.write_prompts(mixed)
    rows = generate(files, model, *few, "--debug-nan")
    bad = {str(place + 1) for place in POISONED}
    assert tokens(rows) == {id: ids for id, ids in expected.items() if id not in bad}
    for row in rows:
        if row["id"] in bad:
            assert row["error"]["code"] == "non_finite_logits"
            assert "token 1 had NaN or infinite logits; stage 0 was the first" in row["error"]["message"]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.layers.0.mlp.down_proj.weight", 0),
        ("lm_head.weight", 1),
        pytest.param("model.layers.{last}.mlp.down_proj.weight", 1, marks=pytest.mark.full),
        pytest.param("model.norm.weight", 1, marks=pytest.mark.full),
    ],
)
def test_the_first_bad_stage_is_named(name, stage, model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    spoil(model, name.format(last=config["num_hidden_layers"] - 1), None, float("nan"))
    files = Files(tmp_path)
    files.write_prompts(CLEAN[:3])
    told = [row["error"]["message"] for row in generate(files, model, "--stages", "2", "--debug-nan")]
    assert len(told) == 3 and all(f"stage {stage} was the first" in message for message in told)
    untold = [row["error"]["message"] for row in generate(files, model, "--stages", "2")]
    assert all("--debug-nan names the first stage" in message for message in untold)


def test_what_float16_does_not_hold_ends_its_request_alone(model, tmp_path):
    """70,000 is a number in float32 and infinite in float16."""
    spoil(model, "model.embed_tokens.weight", POISON, 70_000.0)
    files = Files(tmp_path)
    prompts = [POISONED.get(row, prompt) for row, prompt in enumerate(CLEAN)]
    files.write_prompts(prompts)
    assert len(tokens(generate(files, model))) == len(prompts)
    rows = generate(files, model, "--dtype", "float16")
    assert {int(row["id"]) - 1 for row in rows if "error" in row} == POISONED.keys()
    assert all(len(ids) == 8 for ids in tokens(rows).values())  # last bits decide here which tokens come
