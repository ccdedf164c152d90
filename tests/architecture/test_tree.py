"""Names and contents of the checkout's files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("sarathi_pp", "kernels", "launch", "examples", "docs", "tests")
SUFFIXES = {".py", ".sh", ".toml", ".md", ".txt", ".cff", ".yaml", ".yml", ".sbatch"}
CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "misc", "types"}


def files() -> Iterator[Path]:
    """Return every file of ours: below our folders, and at the root. Exclude files that tools leave."""
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def test_no_file_or_folder_is_a_catch_all() -> None:
    names = {part for path in files() for part in (path.stem, *path.relative_to(ROOT).parts[:-1])}
    assert not CATCH_ALLS & names, "a function without a home names a missing noun"


def test_the_packages_of_pyproject_are_those_of_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for source in (ROOT, ROOT / "kernels"):
        for init in source.glob("sarathi_pp*/**/__init__.py"):
            found.add(".".join(init.parent.relative_to(source).parts))
    assert sorted(settings["packages"]) == sorted(found)


def test_every_folder_with_modules_is_a_package() -> None:
    modules = [path for path in files() if path.suffix == ".py" and "sarathi_pp" in path.relative_to(ROOT).parts[0]]
    assert {module.parent for module in modules} == {m.parent for m in modules if m.name == "__init__.py"}


def test_tests_and_kernels_are_no_packages() -> None:
    """An __init__.py in either puts a folder named `kernels` before the library of that name."""
    assert not [path for path in files() if path.name == "__init__.py" and path.relative_to(ROOT).parts[0] == "tests"]
    assert not (ROOT / "kernels" / "__init__.py").exists()


# Characters of tables and timelines, in pages that show what a command prints.
PRINTED = str.maketrans("", "", "\u2500\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588")


def test_sources_are_ascii() -> None:
    texts = [
        path for path in files() if path.suffix in SUFFIXES or path.name in ("LICENSE", "Dockerfile", ".gitignore")
    ]
    assert len(texts) > 100
    assert not [str(path.relative_to(ROOT)) for path in texts if not ascii_part(path).isascii()]


def ascii_part(path: Path) -> str:
    """Return a file's text, without the characters that pages may show of a command's output."""
    text = path.read_text(encoding="utf-8")
    return text.translate(PRINTED) if path.suffix == ".md" else text
