"""One pipeline that a report page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sarathi_pp.analysis.bubbles import Bubbles
from sarathi_pp.analysis.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PagePart:
    """A run, or one of its replicas.

    Attributes:
        report: the figures of the timeline and the bubbles. It may have more keys.
    """

    title: str
    timeline: Timeline
    bubbles: Bubbles
    report: Mapping[str, Any]
