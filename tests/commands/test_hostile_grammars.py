"""A grammar that is meant to take for ever ends in an error of its row, or in an answer, and its neighbour runs."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.commands.processes import COMMAND, Files, environment
from tests.machine import patient
from tests.text.grammar_model import write_grammar_model
from tests.text.hostile_grammars import HOSTILE


@pytest.mark.full
@pytest.mark.timeout(180)
def test_hostile_grammars_end_and_the_row_next_to_them_keeps_its_answer(tmp_path):
    model = write_grammar_model(tmp_path / "model")
    files = Files(tmp_path)
    free = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
    rows = [free, *({"prompt": "hello", "max_tokens": 8, **one} for one in HOSTILE), free]
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (*COMMAND, *files.options(model, "--stages", "2", "--quiet"))
    done = subprocess.run(command, cwd=tmp_path, env=environment(), check=False, timeout=patient(90))
    assert done.returncode == 3
    first, *found, last = files.rows()
    assert first["token_ids"] == last["token_ids"] and len(last["token_ids"]) == 8
    codes = [row["error"]["code"] if "error" in row else "" for row in found]
    assert len(codes) == len(HOSTILE)
    assert set(codes) <= {"", "invalid_grammar", "no_allowed_token"}, list(zip(HOSTILE, codes, strict=True))
    assert 3 <= codes.count("invalid_grammar") < len(HOSTILE)
