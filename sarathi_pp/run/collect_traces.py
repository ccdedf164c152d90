"""All traces of a run on rank 0's disk: whoever does not write into rank 0's own directory sends its own at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.errors import PeerLostError, ProtocolError, SarathiError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.wire.mesh import Coordinate


def gather(
    plane: ControlPlane,
    run_dir: RunDirectory,
    replicas: Sequence[int],
    give_up: Callable[[int, SarathiError], None],
    *,
    sends: bool,
) -> list[list[Path]]:
    """On rank 0 the traces of each of these replicas, one a stage; nothing on other ranks.

    Every rank of theirs calls it once it has closed its trace. give_up: told of a replica that does not bring its own.
    sends: this rank's is not in rank 0's directory.
    """
    rank, coordinate = plane.place.rank, plane.mesh.coordinate(plane.place.rank)
    found: list[list[Path]] = []
    if rank == 0:
        for replica in replicas:
            try:
                coordinates = [Coordinate(replica, stage, 0) for stage in range(plane.mesh.stages)]
                found.append([_fetch(plane, run_dir, each) for each in coordinates])
            except (PeerLostError, ProtocolError) as error:
                give_up(replica, error)
    elif coordinate.shard == 0:
        plane.send_numbers([float(sends)], 0)
        if sends:
            plane.send_file(run_dir.trace_path(plane.mesh, coordinate), 0)
    return found


def _fetch(plane: ControlPlane, run_dir: RunDirectory, coordinate: Coordinate) -> Path:
    """Return the path of a trace here, once the rank at that coordinate has closed it."""
    path, rank = run_dir.trace_path(plane.mesh, coordinate), plane.mesh.rank(*coordinate)
    if rank != 0 and plane.receive_numbers(1, rank)[0]:
        run_dir.make(path.parent)
        partial = path.with_suffix(".part")
        plane.receive_file(partial, rank)
        partial.replace(path)
    return path
