"""One version, stated in four places, and one exact set of packages that every install uses."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sarathi_pp

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = [re.fullmatch(r"([a-z0-9-]+)==(\d[\w.]*)", line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {match[1]: match[2] for match in matches if match}


def wanted() -> list[Requirement]:
    """Return what a set-up installs: build backend, dependencies and three of the extras."""
    project = SETTINGS["project"]
    extras = [line for name in ("cpu", "dev", "docs") for line in project["optional-dependencies"][name]]
    listed = [*SETTINGS["build-system"]["requires"], *project["dependencies"], *extras]
    return [Requirement(line) for line in listed]


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest and cited
    assert {SETTINGS["project"]["version"], newest[1], cited[1]} == {sarathi_pp.__version__}


def test_torch_and_transformers_are_pinned_exactly() -> None:
    assert (pins()["torch"], pins()["transformers"]) == ("2.13.0", "5.23.0")


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pinned = pins()
    for requirement in wanted():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement} has no line in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not allow {name}=={pinned[name]}"


def test_the_oldest_transformers_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    lines = (ROOT / "launch" / "oldest.txt").read_text().splitlines()
    oldest = {line.name: line.specifier for line in map(Requirement, (line for line in lines if line[0] != "#"))}
    (allowed,) = (one.specifier for one in wanted() if one.name == "transformers")
    (least,) = (Version(one.version) for one in allowed if one.operator == ">=")
    assert least in oldest["transformers"]
    for requirement in wanted():
        if requirement.name in oldest:
            (pin,) = oldest[requirement.name]
            assert pin.operator == "==" and requirement.specifier.contains(pin.version)


def test_what_those_require_in_turn_is_pinned_too() -> None:
    pinned, seen, todo = pins(), set(), [(canonicalize_name(r.name), frozenset(r.extras)) for r in wanted()]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        assert name in pinned, f"{name} is installed and has no line in constraints.txt"
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # a tool that this interpreter does not have
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    assert len(seen) > 40, "the installed packages say nothing of what they require"
