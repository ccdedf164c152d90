"""Collect all traces of a run on rank 0's disk.

At the end of the run, each rank that does not write into rank 0's directory sends its trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.errors import PeerLostError, ProtocolError, SarathiError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.wire.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class CollectedTraces:
    """Paths of the traces on rank 0's disk, one per stage of each replica, and the errors of replicas that sent none.

    `lost` has these errors by the replica's index.
    """

    traces: list[list[Path]]
    lost: Mapping[int, SarathiError]


def gather(
    plane: ControlPlane,
    run_dir: RunDirectory,
    replicas: Sequence[int],
    *,
    sends: bool,
    may_lose: bool,
) -> CollectedTraces:
    """Bring the traces of these replicas to rank 0. Each of their ranks calls this after closing its trace.

    Args:
        replicas: indexes of the replicas.
        sends: True if this rank's trace is not in rank 0's directory, so that this rank must send it.
        may_lose: if a replica does not send its traces, rank 0 returns it in `lost` instead of raising.

    Returns:
        The traces on rank 0; empty lists on other ranks.

    Raises:
        PeerLostError, ProtocolError: a rank does not send its trace.
    """
    rank, coordinate = plane.env.rank, plane.mesh.coordinate(plane.env.rank)
    found: list[list[Path]] = []
    lost: dict[int, SarathiError] = {}
    if rank == 0:
        for replica in replicas:
            try:
                coordinates = [Coordinate(replica, stage, 0) for stage in range(plane.mesh.stages)]
                found.append([_fetch(plane, run_dir, each) for each in coordinates])
            except (PeerLostError, ProtocolError) as error:
                if not may_lose:
                    raise
                lost[replica] = error
    elif coordinate.shard == 0:
        plane.send_numbers([float(sends)], 0)
        if sends:
            plane.send_file(run_dir.trace_path(plane.mesh, coordinate), 0)
    return CollectedTraces(found, lost)


def _fetch(plane: ControlPlane, run_dir: RunDirectory, coordinate: Coordinate) -> Path:
    """Wait until the rank at this coordinate has closed its trace, and receive the trace if it is on another disk.

    Returns:
        The path of the trace on rank 0's disk.
    """
    path, rank = run_dir.trace_path(plane.mesh, coordinate), plane.mesh.rank(*coordinate)
    if rank != 0 and plane.receive_numbers(1, rank)[0]:
        run_dir.make(path.parent)
        partial = path.with_suffix(".part")
        plane.receive_file(partial, rank)
        partial.replace(path)
    return path
