"""Prompts of `check`: each file that cannot be used ends the command with an exit code and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.cli.main import main
from sarathi_pp.errors import InputError, MissingError
from sarathi_pp.process.activity import Activity
from sarathi_pp.process.host import MemoryPool
from sarathi_pp.stages import check, check_memory, check_prompts
from sarathi_pp.stages.check_prompts import Boundary, find_boundaries, random_prompts, read_prompts
from tests.model.families import FAMILIES, write_checkpoint

ADDER = Path("examples/tiny-adder").resolve()


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff1 + 2 =\r\n\n \n12 + 34 =".encode())
    first, second = read_prompts(ADDER, file)
    file.write_text("1 + 2 =\n")
    assert read_prompts(ADDER, file) == [first] and len(second) > len(first)


@pytest.mark.parametrize("data", [b"\n", b""])
def test_a_file_without_prompts(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(data)
    with pytest.raises(InputError, match="has no lines"):
        read_prompts(ADDER, tmp_path / "empty.txt")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("latin1.txt", 65, "latin1.txt, line 2: byte 3 of the line is not UTF-8; convert the file to UTF-8"),
        ("", 65, "is a directory; give a text file with a prompt on each line"),
        ("none.txt", 66, "does not exist; give a text file with a prompt on each line"),
        ("long.txt", 65, "long.txt, line 1: the prompt has"),
        ("loop.txt", 65, "cannot be read: too many levels of symbolic links"),
    ],
)
def test_the_command_says_what_to_do(
    name: str, code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"1 + 2 =\ncaf\xe9\n")
    (tmp_path / "long.txt").write_text("1 + 2 = " * 300)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model", str(ADDER), "--prompts", str(tmp_path / name)])
    shown = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == code and text in shown and "Traceback" not in shown


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The superuser may read every file, so the error is raised here."""

    read = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self.name == "secret.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match="cannot be read: permission denied; give a text file that this user may read"):
        read_prompts(ADDER, tmp_path / "secret.txt")


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    (tmp_path / "text.txt").write_text("hello\n")
    with pytest.raises(InputError, match="tokenizer"):
        read_prompts(tmp_path, tmp_path / "text.txt")
    with pytest.raises(MissingError):
        read_prompts(tmp_path / "none", tmp_path / "text.txt")


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A model in which three of five layers have a window of 600 tokens."""
    config: Any = FAMILIES["gemma3_text"]()
    config.sliding_window, config.max_position_embeddings = 600, 2048
    write_checkpoint("gemma3_text", tmp_path, config=config)
    return tmp_path


def lengths(directory: Path) -> list[int]:
    return [len(prompt) for prompt in random_prompts(directory, 2)]


def test_a_random_prompt_is_longer_than_the_window(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_boundaries(windowed, check_model(windowed)) == [Boundary("sliding_window", 600)]
    assert lengths(windowed) == [1, 7, 64, 200, 664]
    load = check.load_stage
    prompts = random_prompts(windowed, 2)

    def load_wrong(*how: Any) -> Any:
        stage = load(*how)
        stage.specs = type(stage.specs)([None] * 5)
        return stage

    assert check.check_stages("m", windowed, 2, prompts, Activity()).exact
    monkeypatch.setattr(check, "load_stage", load_wrong)
    assert check.check_stages("m", windowed, 2, prompts[:-1], Activity()).exact  # the fault has no effect
    found = check.check_stages("m", windowed, 2, prompts, Activity())
    assert not found.exact and [stage.first_layer for stage in found.stages] == [1, 3]


def test_a_window_that_no_prompt_can_outgrow_is_no_boundary(tmp_path: Path) -> None:
    config: Any = FAMILIES["mistral"]()
    config.sliding_window = config.max_position_embeddings
    write_checkpoint("mistral", tmp_path, config=config)
    assert find_boundaries(tmp_path, check_model(tmp_path)) == []
    assert lengths(tmp_path) == [1, 7, 64, 200]


def test_a_prompt_may_have_no_room_beyond_the_window(tmp_path: Path) -> None:
    config: Any = FAMILIES["mistral"]()
    config.sliding_window = config.max_position_embeddings - 1
    write_checkpoint("mistral", tmp_path, config=config)
    assert lengths(tmp_path) == [1, 7, 64, 200, config.max_position_embeddings]


def test_short_factors_are_a_boundary(tmp_path: Path) -> None:
    write_checkpoint("phi3_longrope", tmp_path)
    facts = check_model(tmp_path)
    assert Boundary("short_factors", facts.longrope_after or 0) in find_boundaries(tmp_path, facts)


@pytest.mark.parametrize("limit", ["time", "memory"])
def test_an_expensive_prompt_is_left_out_and_the_result_says_so(
    limit: str, windowed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> tuple[dict[str, Any], str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", "--model", str(windowed), "--json"])
        printed = capsys.readouterr()
        assert ended.value.code == 0
        return json.loads(printed.out), " ".join(printed.err.split())

    document, shown = run()
    assert document["boundaries"] == [{"kind": "sliding_window", "num_tokens": 600, "reached": True}]
    assert "a prompt was longer than the sliding window of 600 tokens" in shown
    if limit == "time":
        monkeypatch.setattr(check_prompts, "_MOST_FLOP", 1e6)
    else:
        monkeypatch.setattr(check_memory, "memory_pools", lambda: [MemoryPool("host", "the host's memory", 2**25)])
    document, shown = run()
    assert document["boundaries"] == [{"kind": "sliding_window", "num_tokens": 600, "reached": False}]
    assert "no prompt was longer than the sliding window of 600 tokens, so this was not compared" in shown
