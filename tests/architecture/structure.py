"""The structure of the product in figures: package sizes, callbacks, constructors, attributes, import cycles.

    python -m tests.architecture.structure            this tree
    python -m tests.architecture.structure PATH       another checkout, for example an older commit

Static: it reads the sources and imports none of them. Lines are all lines of the files, blank ones too.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each policy is a file, so its folder grows with every new policy.
FOLDERS_THAT_GROW = ("sarathi_pp/core/policy",)


@dataclass(frozen=True)
class Module:
    """A source file. path: below the root of its import path. folder: of the checkout."""

    path: Path
    folder: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def package(self) -> str:
        """Return `sarathi_pp/run`, `sarathi_pp_kernels`, or `sarathi_pp` for modules next to the packages."""
        parts = self.path.parts
        return parts[0] if parts[0] != "sarathi_pp" or len(parts) == 2 else "/".join(parts[:2])


@cache
def modules(root: Path) -> list[Module]:
    """Return the source files of a checkout. They are read and parsed once."""
    found = []
    for source in (root, root / "kernels"):
        for path in sorted(source.glob("sarathi_pp*/**/*.py")):
            relative = path.relative_to(source)
            found.append(Module(relative, str(path.parent.relative_to(root)), path.read_text()))
    return found


def callable_names(found: list[Module]) -> set[str]:
    """Return `Callable`, and every alias of it that a module defines."""
    names = {"Callable"}
    for module in found:
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if any(isinstance(part, ast.Name) and part.id == "Callable" for part in ast.walk(node.value)):
                    names.add(node.targets[0].id)
    return names


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def callable_parameters(found: list[Module]) -> list[str]:
    """Return parameters of functions, and fields of dataclasses, that are or may be called back."""
    names, places = callable_names(found), []

    def is_callable(annotation: ast.expr | None) -> bool:
        parts = ast.walk(annotation) if annotation is not None else ()
        return any(
            (isinstance(part, ast.Name) and part.id in names)
            or (isinstance(part, ast.Attribute) and part.attr in names)
            for part in parts
        )

    for module in found:
        for function in functions(module.tree):
            arguments = function.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if is_callable(argument.annotation):
                    places.append(f"{module.path}:{argument.lineno} {function.name}({argument.arg})")
    return places


def constructors(found: list[Module]) -> list[tuple[int, str]]:
    """Return the lines of each `__init__`, without its docstring, the longest first."""
    sizes = []
    for module in found:
        for owner in ast.walk(module.tree):
            for node in owner.body if isinstance(owner, ast.ClassDef) else ():
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    documented = ast.get_docstring(node) is not None
                    first = node.body[0]
                    told = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
                    sizes.append(
                        ((node.end_lineno or node.lineno) - node.lineno + 1 - told, f"{module.path} {owner.name}")
                    )
    return sorted(sizes, reverse=True)


def late_attributes(found: list[Module]) -> list[str]:
    """Return attributes of `self` that a method creates and no `__init__` or class body has."""
    late = []
    for module in found:
        for owner in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
            known = {name for node in owner.body for name in _class_names(node)}
            made: dict[str, int] = {}
            for method in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
                assigned = _assigned(method)
                if method.name in ("__init__", "__new__", "__enter__", "__post_init__"):
                    known |= assigned.keys()
                else:
                    made |= assigned
            late += [f"{module.path}:{line} {owner.name}.{name}" for name, line in made.items() if name not in known]
    return late


def _class_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in node.targets):
            yield from (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
    elif isinstance(node, ast.FunctionDef):
        yield node.name  # a property with a setter


def _assigned(method: ast.FunctionDef) -> dict[str, int]:
    found = {}
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found[node.attr] = node.lineno
    return found


def cycles(found: list[Module]) -> list[list[str]]:
    """Return groups of modules that import one another, at any time; imports for annotations count too."""
    known = {module.name for module in found}
    graph = {module.name: _imports(module, known) for module in found}
    return [group for group in _components(graph) if len(group) > 1]


def _imports(module: Module, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in known else node.module for name in whole}
    # A package fetches its own names on demand. These imports are not dependencies of its parts.
    return (found & known) - {module.name} if module.name != "sarathi_pp" else set()


def _components(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Return Tarjan's strongly connected components."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            groups.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in order:
            visit(name)
    yield from groups


@cache
def measure(root: Path) -> dict[str, object]:
    found = modules(root)
    total = sum(module.lines for module in found)
    packages: Counter[str] = Counter()
    for module in found:
        packages[module.package] += module.lines
    folders = Counter(module.folder for module in found if module.folder not in FOLDERS_THAT_GROW)
    callables, longest = callable_parameters(found), constructors(found)
    largest, lines = packages.most_common(1)[0]
    fullest, files = folders.most_common(1)[0]
    return {
        "lines": total,
        "packages": len(packages),
        "largest_package": largest,
        "largest_package_share": round(lines / total, 3),
        "fullest_folder": fullest,
        "fullest_folder_files": files,
        "callable_parameters": len(callables),
        "callable_parameters_per_1000_lines": round(1000 * len(callables) / total, 2),
        "longest_constructor": longest[0][1],
        "longest_constructor_lines": longest[0][0],
        "attributes_set_outside_init": late_attributes(found),
        "import_cycles": cycles(found),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT), indent=1))
