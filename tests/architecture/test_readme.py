"""Commands and links of README.md, CONTRIBUTING.md and the pages of docs/ exist, and generated pages are up to date."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

import sarathi_pp
from sarathi_pp import errors
from sarathi_pp.cli.main import cli
from tests.architecture.reference_pages import EXIT_CODES, REFERENCE, pages

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
# Lines of README.md and of each page of docs/.
LONGEST_PAGE = 200


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Return the words of each command line in the bash blocks. Continued lines are joined, comments left out."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def wrong_with(words: list[str]) -> str | None:
    """Return the reason that a command could not be run as written, or None."""
    if words[0] == "bash":
        script = ROOT / words[1]
        return None if script.is_file() else f"there is no {words[1]}"
    if words[0] == "torchrun":
        words = words[words.index("$(which sarathi-pp)") :]
    elif words[0] != "sarathi-pp":
        return None
    command = cli.get_command(click.Context(cli), words[1])
    if command is None:
        return f"there is no command {words[1]}"
    known = {"--help", *(name for option in command.params for name in option.opts)}
    unknown = [word for word in words[2:] if word.startswith("-") and word not in known]
    missing = [word for word in words[2:] if word.startswith("examples/") and not (ROOT / word).exists()]
    return f"{words[1]} has no {unknown}" if unknown else f"there is no {missing}" if missing else None


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_every_command_can_be_run_as_written(text: str) -> None:
    found = commands(text)
    assert len(found) >= 3
    assert not {" ".join(words): why for words in found if (why := wrong_with(words))}


@pytest.mark.parametrize(
    "line",
    ["bash launch/start.sh", "sarathi-pp serve", "sarathi-pp generate --stage 2", "sarathi-pp generate -i examples/no"],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert wrong_with(shlex.split(line))


def test_the_two_commands_stand_alone_in_a_block() -> None:
    assert "bash launch/quickstart.sh\nbash launch/test.sh\n" in blocks(README, "bash")


def test_ci_runs_the_test_command_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "CI=1 exec bash launch/test.sh" and len(lines) <= 6


def test_python_blocks_parse_and_import_public_names() -> None:
    trees = [ast.parse(block) for block in blocks(README, "python")]
    names = {
        alias.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert trees and {"LLM", "SamplingParams"} <= names <= {*sarathi_pp.__all__}


@pytest.mark.parametrize("name", pages())
def test_a_reference_page_is_what_the_code_makes(name: str) -> None:
    assert (REFERENCE / name).read_text() == pages()[name], "python -m tests.architecture.reference_pages writes it"


def test_no_page_is_long() -> None:
    lengths = {page: len((ROOT / page).read_text().splitlines()) for page in ("README.md", *DOCS)}
    assert not {page: length for page, length in lengths.items() if length > LONGEST_PAGE}


def test_every_page_is_reached_from_the_index() -> None:
    """Links lead from page to page."""
    reached, open_pages = set(), [ROOT / "docs" / "index.md"]
    while open_pages:
        page = open_pages.pop()
        if page not in reached:
            reached.add(page)
            targets = (page.parent / target for target, _ in links(page) if target.endswith(".md"))
            open_pages += [target.resolve() for target in targets]
    assert not {ROOT / page for page in DOCS} - reached


RESULTS = ROOT / "docs" / "benchmarks" / "results"


def test_the_figures_of_the_first_screen_are_those_of_the_records() -> None:
    record = json.loads((RESULTS / "real-300m-64.json").read_text())
    picture, claim = README.partition("Two stages on two CPU")[2].partition("\n\n")[0].split(" With 64")
    drawn = json.loads((RESULTS / "orca-balanced.json").read_text())
    for policy in ("orca", "balanced"):
        bubble = record["cases"][f"P:D 8, {policy}, 2 stages"]["bubble_ratio"]["median"]
        assert f"{100 * bubble:.1f} %" in claim
        assert f"{100 * drawn[policy]['bubble_ratio']:.1f} %" in picture
    gain = record["against balanced"]["8"]["P:D 8, orca, 2 stages"]["tokens/s, balanced / this"]["median"]
    assert f"{gain:.2f} times" in claim


def test_the_advice_of_the_picture_came_true_as_readme_says() -> None:
    drawn = json.loads((RESULTS / "orca-balanced.json").read_text())
    wall_s = drawn["orca"]["wall_s"]
    saved_s = wall_s - drawn["balanced"]["wall_s"]
    assert f"was {saved_s:.1f} s shorter ({100 * saved_s / wall_s:.0f} %)" in README
    assert f"of {wall_s:.1f} s (" in README


def test_every_exit_code_is_listed_and_no_other() -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    codes = {kind.exit_code for kind in classes} | {errors.EXIT_OK, errors.EXIT_ROWS_FAILED, errors.EXIT_INTERRUPTED}
    assert EXIT_CODES.keys() == codes


ARCHITECTURE = (ROOT / "docs" / "internals" / "architecture.md").read_text()


def test_every_file_that_the_architecture_page_names_exists() -> None:
    named = re.findall(r"`(\w+/[\w/]*(?:\.py)?|\w+\.py)`", ARCHITECTURE)
    assert len(named) > 60
    assert not [name for name in named if not (ROOT / "sarathi_pp" / name).exists() and not (ROOT / name).exists()]


def test_the_architecture_page_orders_packages_as_the_contract_does() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for layer in contracts[0]["layers"] if layer != "__main__"]
    (page,) = re.findall(r"```\n(lm_eval -> .*?)```", ARCHITECTURE, re.DOTALL)
    assert re.split(r"\s*->\s*", page.strip()) == layers


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", *DOCS])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target, anchor in links(page):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), anchor


@pytest.mark.parametrize("name", DOCS)
def test_links_stay_within_the_site(name: str) -> None:
    """The folder docs/ is the root of the site, and a page outside of it would not be there."""
    outside = [target for target, _ in links(ROOT / name) if not inside((ROOT / name).parent / target, ROOT / "docs")]
    assert not outside


def inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder)


def links(page: Path) -> list[tuple[str, str]]:
    """Return target and anchor of each link that does not leave the repository, except in code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, with hyphens for spaces."""
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}
