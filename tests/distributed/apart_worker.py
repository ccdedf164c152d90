"""One rank of a pipeline whose processes do not find each other's sockets, as in network namespaces of their own.

Arguments and answers are families_worker's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sarathi_pp.distributed import control_plane
from sarathi_pp.distributed.control_plane import Topology
from tests.commands import families_worker


def open_and_say(self: Topology, *arguments: Any, **options: Any) -> None:
    assert options["share"]
    open_edges(self, *arguments, **options)
    sys.stderr.write("shares no edge\n" if self.shared_edges == [] else f"shares {self.shared_edges}\n")


if __name__ == "__main__":
    control_plane.knock = lambda name: None
    open_edges = Topology.open_edges
    Topology.open_edges = open_and_say  # type: ignore[method-assign]
    families_worker.main(Path(sys.argv[1]), Path(sys.argv[2]))
