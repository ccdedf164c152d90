"""A stage that reads the vocabulary for grammars sends no heartbeat in that time, and no rank takes it for lost."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.commands.processes import COMMAND, Files, environment
from tests.faults.jobs import fault
from tests.machine import patient
from tests.text.grammar_model import write_grammar_model

PEER_TIMEOUT_S = 2.0
VOCAB_SIZE = 25_000


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stream_with_a_grammar_and_a_short_timeout(stage, tmp_path):
    """The library keeps the interpreter's lock for three timeouts."""
    model, files = write_grammar_model(tmp_path / "model", VOCAB_SIZE), Files(tmp_path)
    rows = [{"max_tokens": 8, "ignore_eos": True}, {"max_tokens": 30, "guided_regex": "[0-9]{3}"}]
    where = ("--input", "-", "--output", str(files.output), "--kv-cache-memory", "16MiB", "--quiet")
    done = subprocess.run(
        (*COMMAND, "generate", "--model", str(model), *where, "--stages", "2", "--peer-timeout", str(PEER_TIMEOUT_S)),
        cwd=tmp_path,
        env={**environment(), **fault(stage, "vocabulary", int(3000 * PEER_TIMEOUT_S))},
        input="".join(json.dumps({"prompt": "hello", **row}) + "\n" for row in rows),
        capture_output=True,
        text=True,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, guided = files.rows()
    assert guided["finish_reason"] == "stop" and guided["text"].isdecimal()
