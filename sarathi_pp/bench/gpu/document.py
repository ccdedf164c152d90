"""The document of `sarathi-pp bench gpu`: figures by part, and checks. It can be completed in several runs.

    {"schema": ..., "machine": {...}, "checks": [{"part": "exact", "what": ..., ...}], "rates": {...}, ...}

A part is complete if it has no `error` and was not `left_out`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sarathi_pp.bench.gpu.parts import NAMES
from sarathi_pp.errors import ConfigError

Figures = dict[str, Any]
SCHEMA = "sarathi-pp/gpu/3"


class GpuDocument:
    """Figures and checks of the parts that have run.

    Attributes:
        parts: figures of each part by its name.
        checks: results of all checks. Each names its `part`.
    """

    def __init__(self, parts: dict[str, Figures] | None = None, checks: Sequence[Figures] = ()) -> None:
        self.parts = parts or {}
        self.checks = list(checks)

    @classmethod
    def read(cls, path: Path) -> GpuDocument:
        """Return the document in a file; an empty one if there is no such file.

        Raises:
            ConfigError: the file is not a document with this schema.
        """
        if not path.exists():
            return cls()
        try:
            found = json.loads(path.read_bytes())
            schema = found["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a document of bench gpu; choose another --output") from error
        if schema != SCHEMA:
            raise ConfigError(f"{path} has the schema {schema}, not {SCHEMA}; choose another --output")
        return cls({name: found[name] for name in NAMES if name in found}, found["checks"])

    def to_json(self) -> Figures:
        took_s = sum(figures.get("took_s", 0.0) for figures in self.parts.values())
        parts = {name: self.parts[name] for name in NAMES if name in self.parts}
        machine = parts.pop("machine", {})
        return {"schema": SCHEMA, "machine": machine, "checks": self.checks, **parts, "took_s": took_s}

    @property
    def complete(self) -> set[str]:
        """Names of the parts that have all their figures."""
        return {name for name, figures in self.parts.items() if not {"error", "left_out"} & figures.keys()}

    @property
    def met(self) -> bool:
        return all(check["met"] for check in self.checks)

    def put(self, name: str, figures: Figures, checks: Sequence[Figures]) -> None:
        """Replace the figures and checks of a part.

        A part that is complete stays as it is if the new figures are left out and no new check is missed.

        Raises:
            ConfigError: the part is `machine`, and its figures differ from those in the document, or it failed and
                cannot be compared with them.
        """
        if "left_out" in figures and name in self.complete and all(check["met"] for check in checks):
            return
        if name == "machine":
            self._check_machine(figures)
        self.parts[name] = figures
        others = [check for check in self.checks if check["part"] != name]
        self.checks = sorted([*others, *checks], key=lambda check: NAMES.index(check["part"]))

    def leave_out(self, name: str, why: str) -> None:
        """Record that there was no time for a part. If it is complete by an earlier run, keep that."""
        self.put(name, {"left_out": why}, ())

    def _check_machine(self, figures: Figures) -> None:
        if "machine" not in self.complete or self.parts.keys() <= {"machine"}:
            return
        if "error" in figures:
            raise ConfigError(
                f"the part machine failed, so this may be another machine than that of the document: {figures['error']}"
            )
        before = self.parts["machine"]
        differ = sorted(name for name in {*before, *figures} - {"took_s"} if before.get(name) != figures.get(name))
        if differ:
            name = differ[0]
            raise ConfigError(
                f"the document is of another machine: {name} was {before.get(name)!r} and is {figures.get(name)!r}; "
                "choose another --output"
            )
