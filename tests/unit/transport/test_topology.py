"""Nodes, local and cross ranks follow from which ranks share a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.transport.host import topology

# node id of each rank -> nodes, then (local_rank, local_size, cross_rank, cross_size) of each rank, homogeneous
TABLE = [
    ([0], ((0,),), [(0, 1, 0, 1)], True),
    ([0, 0, 0], ((0, 1, 2),), [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)], True),
    ([0, 0, 2, 2], ((0, 1), (2, 3)), [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)], True),
    ([0, 1, 0, 1], ((0, 2), (1, 3)), [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)], True),
    (
        [0, 0, 2, 2, 2],
        ((0, 1), (2, 3, 4)),
        [(0, 2, 0, 2), (1, 2, 0, 2), (0, 3, 1, 2), (1, 3, 1, 2), (2, 3, 0, 1)],
        False,
    ),
    (["b", "a", "b"], ((0, 2), (1,)), [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)], False),
]


@pytest.mark.parametrize(("node_ids", "nodes", "places", "homogeneous"), TABLE)
def test_table(
    node_ids: list[object],
    nodes: tuple[tuple[int, ...], ...],
    places: list[tuple[int, int, int, int]],
    homogeneous: bool,
) -> None:
    for rank, place in enumerate(places):
        seen = topology.describe_topology(node_ids, rank)
        assert seen.nodes == nodes
        assert (seen.local_rank, seen.local_size, seen.cross_rank, seen.cross_size) == place
        assert seen.homogeneous is homogeneous


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_local_and_cross_ranks_name_each_rank_once(node_ids: list[int]) -> None:
    places = [topology.describe_topology(node_ids, rank) for rank in range(len(node_ids))]
    nodes = places[0].nodes
    assert sorted(rank for node in nodes for rank in node) == list(range(len(node_ids)))
    assert len({(place.local_rank, place.cross_rank) for place in places}) == len(node_ids)
    for place in places:
        assert place.cross_size == sum(other.local_rank == place.local_rank for other in places)
        assert 0 <= place.cross_rank < place.cross_size
        assert 0 <= place.local_rank < place.local_size


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(IndexError, match="rank 3 of 2"):
        topology.describe_topology([0, 0], 3)


@pytest.mark.parametrize(
    ("runnable", "gone"),
    [([1] * 60, False), ([4] * 60, True), ([4, 1, 1, 4, 4] * 12, True), ([1, 4, 1, 1, 4] * 12, False)],
)
def test_a_spare_core_is_gone_where_most_looks_find_all_in_use(
    runnable: list[int], gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(runnable)
    monkeypatch.setattr(topology, "runnable_threads", lambda: next(seen))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    core = topology.SpareCore()
    answers = [core.is_gone() for _ in runnable]
    assert not any(answers[: topology.FIRST_LOOKS - 1])
    assert answers[-1] == gone


def test_the_system_says_how_many_threads_run() -> None:
    assert topology.runnable_threads() >= 1
