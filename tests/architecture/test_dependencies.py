"""Every import of the package is a dependency of its installation or of one of its extras."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# For users; packages only in `dev` are not installed for them.
EXTRAS = ("cpu", "gpu", "flash", "guided", "lm-eval")
OURS = {"sarathi_pp", "sarathi_pp_kernels"}


def sources() -> Iterator[Path]:
    """Return all files of the package except the programs that run in other engines' environments."""
    for folder in (ROOT / "sarathi_pp", ROOT / "kernels"):
        yield from (path for path in folder.rglob("*.py") if not path.match("bench/peers/*_program.py"))


def imported(path: Path) -> set[str]:
    """Return top-level names of all imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (line for name in EXTRAS for line in project["optional-dependencies"][name])
    return {canonicalize_name(Requirement(line).name) for line in (*project["dependencies"], *extras)}


def test_every_import_of_a_third_party_is_declared() -> None:
    """The comparison is by the name of the module, which so far always equals that of its distribution."""
    missing: dict[str, set[str]] = {}
    known = declared()
    for path in sources():
        for name in imported(path) - OURS - sys.stdlib_module_names:
            if canonicalize_name(name) not in known:
                missing.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    assert not missing, f"imported, and in neither dependencies nor extras of pyproject.toml: {missing}"
    assert len(known & {canonicalize_name(name) for path in sources() for name in imported(path)}) > 10
