"""The vocabulary for grammars is read before the run if a request names one, or if other ranks cannot wait later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.cli.main import main
from sarathi_pp.config import RunConfig
from sarathi_pp.drawing import grammar
from sarathi_pp.engine.engine import Engine
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.stages.emulated_stage import emulated_facts
from tests.core.cost.test_profile import PROFILE
from tests.text.grammar_model import write_grammar_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_grammar_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("key", "expected"),
    [({"guided_regex": "[0-9]{3}"}, ["thread", "vocabulary", "run"]), ({"ignore_eos": True}, ["run"])],
    ids=["grammar", "none"],
)
def test_a_run_of_a_file(key, expected, model, tmp_path, monkeypatch):
    """A file without grammars starts no thread for them, and reads no vocabulary."""
    order: list[str] = []

    def note(owner: Any, name: str, what: str) -> None:
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (order.append(what), work(*args))[1])

    note(grammar, "deep_executor", "thread")
    note(grammar, "_vocabulary", "vocabulary")
    note(Engine, "run", "run")
    # Other tests in this process may leave threads, and with them a rank would not return.
    monkeypatch.setattr("sarathi_pp.run.ending._communicates", lambda: False)
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps({"prompt_token_ids": [3, 4], "max_tokens": 8, **key}) + "\n")
    options = ("--stages", "1", "--kv-cache-memory", "16MiB", "--quiet", "--input", str(given), "--output", str(output))
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(model), *options])
    assert ended.value.code == 0
    assert order == expected
    answer = json.loads(output.read_text())
    assert answer["finish_reason"] == ("stop" if len(expected) > 1 else "length")


@pytest.mark.parametrize(
    ("named", "stages", "short", "expected"),
    [
        (True, 1, False, True),
        (False, 2, True, False),
        (None, 2, True, True),
        (None, 2, False, False),
        (None, 1, True, False),
    ],
    ids=["named", "not named", "short timeout", "long timeout", "no other rank"],
)
def test_the_vocabulary_is_read_first(named, stages, short, expected):
    facts = emulated_facts(PROFILE, 16)
    bound_s = facts.vocab_size * 1e-4
    config = RunConfig(model="", stages=stages, peer_timeout_s=bound_s * (0.99 if short else 1.01))
    run_dir = RunDirectory(Path("never-made"))
    checked = Preflight(config, None, PROFILE, facts, GenerationDefaults(), run_dir, names_grammars=named)
    assert checked.prepares_grammars is expected
