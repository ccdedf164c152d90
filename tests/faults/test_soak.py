"""Thousands of short rows, of which one in a hundred is bad, and killed stages: every row still has its line.

The default is 4,000 rows and one kill; `--full` runs 20,000 rows and four kills.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import thinning
from tests.commands.processes import Files
from tests.faults.jobs import num_lines, started
from tests.faults.test_bad_values import POISON, spoil, write_model
from tests.machine import patient

pytestmark = pytest.mark.timeout(500)

NUM_ROWS, KILLS = (20_000, 4) if thinning.full else (4_000, 1)
MAX_MODEL_LEN = 64
OPTIONS = ("--max-new-tokens", "6", "--ignore-eos", "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32")
# Memory of a stage between two moments of work; an allocation per row that is never freed shows as more.
MOST_GROWTH_BYTES = 24 * 2**20

# Each kind by the code of its error line; a row's number makes its id.
BAD: dict[str, Callable[[int], bytes]] = {
    "invalid_json": lambda row: b'{"id": "r%d", "prompt_token_ids": [3, 4' % row,
    "invalid_utf8": lambda row: b'{"id": "r%d", "prompt": "\xff\xfe"}' % row,
    "duplicate_id": lambda row: b'{"id": "r0", "prompt_token_ids": [3]}',
    "empty_prompt": lambda row: b'{"id": "r%d", "prompt_token_ids": []}' % row,
    "context_length_exceeded": lambda row: b'{"id": "r%d", "prompt_token_ids": %s}' % (row, str([3] * 65).encode()),
    "invalid_token_id": lambda row: b'{"id": "r%d", "prompt_token_ids": [3, 123456789]}' % row,
    "unknown_parameter": lambda row: b'{"id": "r%d", "prompt_token_ids": [3], "temprature": 1}' % row,
    "unsupported_parameter": lambda row: b'{"id": "r%d", "prompt_token_ids": [3], "best_of": 2}' % row,
    "invalid_parameter": lambda row: b'{"id": "r%d", "prompt_token_ids": [3], "temperature": -1}' % row,
    "missing_required_parameter": lambda row: b'{"id": "r%d"}' % row,
    "no_tokenizer": lambda row: b'{"id": "r%d", "prompt": "text"}' % row,
    "non_finite_logits": lambda row: b'{"id": "r%d", "prompt_token_ids": [3, %d, 5]}' % (row, POISON),
}


def write_rows(path: Path) -> dict[str, int]:
    """Write the rows; return the number of bad rows by kind."""
    rng = random.Random("soak")
    kinds = list(BAD)
    counts = dict.fromkeys(kinds, 0)
    lines = [b'{"id": "r0", "prompt_token_ids": [3, 4]}']
    for row in range(1, NUM_ROWS):
        if row % 100 == 50:
            kind = kinds[row // 100 % len(kinds)]
            counts[kind] += 1
            lines.append(BAD[kind](row))
        else:
            prompt = [rng.choice((3, 4, 5, 6, 7, 8)) for _ in range(rng.randint(1, 30))]
            lines.append(json.dumps({"id": f"r{row}", "prompt_token_ids": prompt}).encode())
        if row % 1000 == 7:
            lines.append(b"  ")  # blank: no row
    path.write_bytes(b"\n".join(lines))
    return counts


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    spoil(model, "model.embed_tokens.weight", POISON, float("nan"))
    files = Files(tmp_path)
    counts = write_rows(files.input)
    rng = random.Random("kills")
    with started(files, model, *OPTIONS, "--stages", "2", "--max-restarts", str(KILLS)) as run:
        for kill in range(KILLS):
            run.wait_for_lines(NUM_ROWS * (kill + 1) // (2 * KILLS + 2))
            run.stage(rng.randrange(2)).kill()
            psutil.wait_procs(run.family[1:], timeout=patient(10))
        # The last start works off the second half undisturbed.
        run.wait_for_lines(NUM_ROWS * 6 // 10)
        stages = [run.stage(rank) for rank in range(2)]
        before = [stage.memory_info().rss for stage in stages]
        run.wait_for_lines(NUM_ROWS * 9 // 10)
        growth = [stage.memory_info().rss - earlier for stage, earlier in zip(stages, before, strict=True)]
        said = run.end(300)
        assert run.process.returncode == 3, said
    assert max(growth) < MOST_GROWTH_BYTES, growth
    assert num_lines(files.output) == NUM_ROWS
    rows = [json.loads(line) for line in files.output.read_text().splitlines()]
    found = dict.fromkeys(BAD, 0)
    answered = []
    for row in rows:
        if "error" in row:
            found[row["error"]["code"]] += 1
        else:
            answered.append(row["id"])
            assert len(row["token_ids"]) == 6
    assert found == counts and min(counts.values()) > 0
    assert len(answered) == len(set(answered)) == NUM_ROWS - sum(counts.values())
    # The engine asserts that all pages came back; otherwise it would have ended with 70.
    assert len(list(files.run.glob("attempt-*"))) == KILLS + 1
