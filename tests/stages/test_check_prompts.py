"""Prompts of `check`: each file that cannot be used ends the command with an exit code and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_pp.cli.main import main
from sarathi_pp.errors import InputError, MissingError
from sarathi_pp.stages.check_prompts import read_prompts
from tests.model.families import write_checkpoint

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
