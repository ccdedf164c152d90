"""A rank that reads a vocabulary or a tokenizer sends no heartbeat in that time, and no other rank gives it up."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.commands.processes import COMMAND, Files, environment
from tests.faults.jobs import fault
from tests.machine import patient
from tests.text.grammar_model import write_grammar_model

PEER_TIMEOUT_S = 2.0
SILENCE_MS = int(3000 * PEER_TIMEOUT_S)
VOCAB_SIZE = 25_000


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stream_with_a_grammar_and_a_short_timeout(stage, tmp_path):
    """The library keeps the interpreter's lock for three timeouts."""
    model = write_grammar_model(tmp_path / "model", VOCAB_SIZE)
    rows = [{"max_tokens": 8, "ignore_eos": True}, {"max_tokens": 30, "guided_regex": "[0-9]{3}"}]
    answered, _ = answers_of(model, rows, tmp_path, fault(stage, "vocabulary", SILENCE_MS), "--stages", "2")
    _, guided = answered
    assert guided["finish_reason"] == "stop" and guided["text"].isdecimal()


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("leader, shape", [(0, ("--stages", "2")), (1, ("--stages", "1", "--replicas", "2"))])
def test_a_tokenizer_that_takes_longer_than_the_timeout(leader, shape, tmp_path):
    rows = [{"max_tokens": 4, "ignore_eos": True}] * 3
    slow = fault(leader, "tokenizer", SILENCE_MS)
    answered, said = answers_of(write_grammar_model(tmp_path / "model"), rows, tmp_path, slow, *shape)
    assert len(answered) == 3 and "lost" not in said


def answers_of(model, rows, folder, faulty, *shape):
    """Run `generate` on a stream of rows, with one rank that fails. Return its output lines and its messages."""
    files = Files(folder)
    where = ("--input", "-", "--output", str(files.output), "--kv-cache-memory", "16MiB", "--quiet")
    done = subprocess.run(
        (*COMMAND, "generate", "--model", str(model), *where, *shape, "--peer-timeout", str(PEER_TIMEOUT_S)),
        cwd=folder,
        env={**environment(), **faulty},
        input="".join(json.dumps({"prompt": "hello", **row}) + "\n" for row in rows),
        capture_output=True,
        text=True,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return files.rows(), done.stderr
