"""One rank of a pipeline that prints when it has loaded its slice and when it counts its pages; the last rank loads
late.

The arguments and answers are those of families_worker.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sarathi_pp.stages.model_stage import ModelStages
from tests.commands import families_worker

LATE_S = 1.0


def say(what: str) -> None:
    """Print the line in one write, because both ranks write to the same pipe."""
    sys.stderr.write(f"{what} at {time.monotonic()}\n")


def load_late(self: ModelStages, layers: tuple[int, int], room_bytes: int) -> None:
    load(self, layers, room_bytes)
    time.sleep(LATE_S * int(os.environ["RANK"]))
    say("loaded")


def count_and_say(self: ModelStages, layers: tuple[int, int], sharers: Mapping[str, int]) -> int:
    say("counts")
    return count_pages(self, layers, sharers)


if __name__ == "__main__":
    load, count_pages = ModelStages.load, ModelStages.count_pages
    ModelStages.load, ModelStages.count_pages = load_late, count_and_say  # type: ignore[method-assign]
    families_worker.main(Path(sys.argv[1]), Path(sys.argv[2]))
