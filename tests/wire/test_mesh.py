"""Positions of ranks in the mesh, and the edges between them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.wire.mesh import Coordinate, Mesh
from sarathi_pp.wire.order import downstream, edges, forward_edges, upstream

meshes = st.builds(Mesh, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))


@st.composite
def placed(draw: st.DrawFn) -> Mesh:
    """Return a mesh over hosts that a launcher has mixed."""
    mesh = draw(meshes)
    return mesh.over(draw(st.lists(st.sampled_from("abc"), min_size=mesh.size, max_size=mesh.size)))


def test_edges_of_one_pipeline_form_one_ring():
    assert edges(Mesh()) == ()
    assert edges(Mesh(stages=2)) == ((0, 1), (1, 0))
    assert edges(Mesh(stages=4)) == ((0, 1), (1, 2), (2, 3), (3, 0))


def test_edges_of_two_replicas_of_two_stages_of_two_ranks():
    assert edges(Mesh(2, 2, 2)) == (
        *((0, 2), (1, 3), (4, 6), (5, 7)),  # activations, from shard to the same shard
        *((2, 0), (6, 4)),  # results, of one shard
        *((0, 1), (4, 5)),  # headers
        *((0, 4), (4, 0)),  # requests and answers
    )


def test_neighbours_stay_on_a_host_whatever_numbers_a_launcher_gave():
    """Slurm's cyclic distribution: every other rank is on the other host."""
    mesh = Mesh(stages=4).over(["a", "b", "a", "b"])
    assert mesh.ranks == (0, 2, 1, 3)
    assert forward_edges(mesh) == ((0, 2), (2, 1), (1, 3))  # one of three connects the two hosts
    assert [mesh.coordinate(rank).stage for rank in range(4)] == [0, 2, 1, 3]
    assert Mesh(stages=4).over(["b", "b", "a", "a"]).ranks == (0, 1, 2, 3)


@given(placed())
def test_every_rank_has_one_seat_and_rank_0_leads_the_first_replica(mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert len(set(coordinates)) == mesh.size
    assert all(mesh.rank(*coordinate) == rank for rank, coordinate in enumerate(coordinates))
    assert coordinates[0] == Coordinate(0, 0, 0) and coordinates[0].leads
    assert sorted(mesh.leader(replica) for replica in range(mesh.replicas)) == [
        rank for rank, coordinate in enumerate(coordinates) if coordinate.leads
    ]
    assert sorted(rank for replica in range(mesh.replicas) for rank in mesh.members(replica)) == list(range(mesh.size))


@given(placed())
def test_a_directed_edge_has_one_use_and_leads_to_another_rank(mesh):
    """Two uses would mean two orders on one communicator."""
    most = Counter(edges(mesh)).most_common(1)
    assert not most or most[0][1] == 1
    assert all(sender != receiver for sender, receiver in edges(mesh))


@given(placed())
def test_what_goes_down_from_one_seat_comes_up_at_the_other(mesh):
    ring = set(edges(mesh))
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        target, source = downstream(mesh, coordinate), upstream(mesh, coordinate)
        if target is None:
            assert coordinate.stage == mesh.stages - 1 and coordinate.shard > 0
        elif target == rank:
            assert mesh.stages == 1 and source == rank  # a leader that is the last stage too
        else:
            assert (rank, target) in ring
            assert upstream(mesh, mesh.coordinate(target)) == rank
        assert source == rank or (source, rank) in ring


@pytest.mark.parametrize(
    ("mesh", "title"),
    [
        (Mesh(stages=4), "stage 3 (rank 3)"),
        (Mesh(2, 2), "stage 1 of replica 1 (rank 3)"),
        (Mesh(1, 2, 2), "shard 1 of stage 1 (rank 3)"),
    ],
)
def test_titles_tell_no_more_than_is_needed(mesh, title):
    assert mesh.title(3) == title
