"""The static site of docs/ builds without a warning."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import patient

ROOT = Path(__file__).parents[2]


def build(docs: Path) -> subprocess.CompletedProcess[str]:
    zensical = Path(sys.executable).with_name("zensical")
    command = (zensical, "build", "--strict", "--config-file", docs / "zensical.toml")
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)


def test_the_site_builds_without_warnings_and_has_every_page(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("site"))
    done = build(docs)
    assert (done.returncode, "No issues found" in done.stdout + done.stderr) == (0, True), done.stdout + done.stderr
    pages = [page.relative_to(docs) for page in docs.rglob("*.md")]
    assert len(pages) > 50
    made = [page.parent if page.name == "index.md" else page.with_suffix("") for page in pages]
    assert not [page for page in made if not (docs / "site" / page / "index.html").is_file()]


@pytest.mark.parametrize(("link", "fails"), [("index.md", False), ("nowhere.md", True)])
def test_a_dead_link_fails_the_build(tmp_path: Path, link: str, fails: bool) -> None:
    settings, _, _ = (ROOT / "docs" / "zensical.toml").read_text().partition("nav = [")
    (tmp_path / "zensical.toml").write_text(settings)
    (tmp_path / "index.md").write_text(f"# A site of one page\n\n[a link]({link})\n")
    assert bool(build(tmp_path).returncode) == fails


def test_the_menu_names_every_page() -> None:
    menu = (ROOT / "docs" / "zensical.toml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f'"{page}"' not in menu]
