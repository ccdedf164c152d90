"""One rank of a pipeline whose processes cannot find each other's sockets, as in separate network namespaces.

The arguments and answers are those of families_worker.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sarathi_pp.distributed import edges
from sarathi_pp.distributed.edges import Edges
from tests.commands import families_worker


def connect_and_say(*arguments: Any, **options: Any) -> Edges:
    assert options["share"]
    connected = connect(*arguments, **options)
    sys.stderr.write("shares no edge\n" if connected.shared == [] else f"shares {connected.shared}\n")
    return connected


if __name__ == "__main__":
    edges.connect = lambda name: None
    connect = Edges.connect
    Edges.connect = connect_and_say  # type: ignore[method-assign]
    families_worker.main(Path(sys.argv[1]), Path(sys.argv[2]))
