"""Nodes, local and cross ranks, cores for each rank, and the variables of torchrun."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.transport.host import rank_variables, topology
from hvlike.transport.host.rank_variables import Own, address_for, interfaces, set_missing, without_own
from hvlike.transport.host.topology import (
    any_crowded,
    any_machine_crowded,
    cores_on_machine,
    cores_per_rank,
    has_spare_core,
    is_crowded,
    machine_id,
)

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


@pytest.mark.parametrize(
    ("affinities", "cores"),
    [
        ([{0}, {1}], 1.0),
        ([{0, 1}, {0, 1}], 1.0),
        ([{0, 1}] * 4, 0.5),
        ([{0, 1, 2, 3, 4, 5, 6, 7}] * 2, 4.0),
        ([{0}], 1.0),
        ([{0, 1}, {1}], 1.5),
    ],
)
def test_a_core_counts_for_all_ranks_that_may_run_on_it(affinities: list[set[int]], cores: float) -> None:
    assert cores_per_rank([frozenset(each) for each in affinities], 0) == pytest.approx(cores)


@pytest.mark.parametrize(("cores", "crowded", "spare"), [(0.5, True, False), (1.0, False, False), (2.0, False, True)])
def test_what_follows_for_waiting(cores: float, crowded: bool, spare: bool) -> None:
    assert is_crowded(cores) is crowded
    assert has_spare_core(cores) is spare


@pytest.mark.parametrize(
    ("affinities", "crowded"), [([{0}, {1}], False), ([{0}, {0}, {1, 2}], True), ([{0, 1}, {0, 1}, {0, 1}], True)]
)
def test_all_ranks_of_a_node_see_whether_one_of_them_is_crowded(affinities: list[set[int]], crowded: bool) -> None:
    assert any_crowded([frozenset(each) for each in affinities]) is crowded


@pytest.mark.parametrize(
    ("machines", "cores"), [(["a", "b", "c"], 2.0), (["a", "a", "b"], 1.0), (["a", "a", "a"], pytest.approx(2 / 3))]
)
def test_ranks_in_containers_of_one_machine_share_its_cores(machines: list[str], cores: float) -> None:
    assert cores_on_machine([(each, frozenset({0, 1})) for each in machines], 0) == cores


@pytest.mark.parametrize(("machines", "crowded"), [(["a", "b", "a", "b"], False), (["a", "b", "a", "a"], True)])
def test_all_ranks_of_a_job_see_whether_one_of_them_is_crowded(machines: list[str], crowded: bool) -> None:
    assert any_machine_crowded([(each, frozenset({0, 1})) for each in machines]) is crowded


def test_a_machine_has_one_number_for_all_its_processes() -> None:
    assert machine_id() == machine_id() != ""


ETHERNET, INFINIBAND, DOCKER, LOOPBACK = (
    "10.0.0.{}/255.255.0.0",
    "192.168.5.{}/255.255.255.0",
    "172.17.0.1/16",
    "127.0.0.1/8",
)
NODES = [
    ([], "127.0.0.1"),
    ([("a", [LOOPBACK, ETHERNET.format(1)])], "127.0.0.1"),
    # The same machine, treated as two nodes.
    ([("a", [LOOPBACK, ETHERNET.format(1)])] * 2, "127.0.0.1"),
    ([("a", [LOOPBACK, DOCKER, ETHERNET.format(1)]), ("b", [LOOPBACK, DOCKER, ETHERNET.format(2)])], "10.0.0.1"),
    # A management network that only two of three share.
    (
        [
            ("a", [ETHERNET.format(1), INFINIBAND.format(1)]),
            ("b", [ETHERNET.format(2), INFINIBAND.format(2)]),
            ("c", [INFINIBAND.format(3)]),
        ],
        "192.168.5.1",
    ),
    # Routed networks: the name has to be resolved.
    ([("a", ["10.1.0.1/24", LOOPBACK]), ("b", ["10.2.0.1/24", LOOPBACK])], "a"),
]


@pytest.mark.parametrize(("nodes", "address"), NODES)
def test_the_address_is_one_that_all_nodes_reach(nodes: list[tuple[str, list[str]]], address: str) -> None:
    assert address_for(nodes) == address


def test_interfaces_are_found_with_their_networks() -> None:
    assert any(each.startswith("127.0.0.1/255.") for each in interfaces())


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "values", {})


def test_what_the_user_has_set_stays_and_what_hvlike_has_set_follows_the_rank() -> None:
    environment = {"LOCAL_RANK": "7", "MASTER_ADDR": ""}
    set_missing(environment, {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "a"})
    assert environment == {"RANK": "1", "LOCAL_RANK": "7", "MASTER_ADDR": "a"}
    set_missing(environment, {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "b"})
    assert environment == {"RANK": "0", "LOCAL_RANK": "7", "MASTER_ADDR": "b"}
    assert without_own(environment) == {"LOCAL_RANK": "7"}
    set_missing(environment, {"LOCAL_RANK": "0"}, anew=True)
    assert environment["LOCAL_RANK"] == "0"


def world(rank: int, size: int) -> Any:
    found = SimpleNamespace(rank=rank, size=size, local_rank=rank, local_size=size, nodes=(tuple(range(size)),))
    found.place = found
    return found


def test_a_process_without_a_launcher_is_told_nothing_at_the_start() -> None:
    environment: dict[str, str] = {}
    rank_variables.set_at_start(environment, world(0, 1))
    assert environment == {}
    rank_variables.set_at_start(environment | {"PMI_SIZE": "1"}, world(0, 1))
    assert Own.values.keys() == {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"
    }  # fmt: skip


def test_the_master_of_a_batch_script_is_kept() -> None:
    given = {"MASTER_ADDR": "node17", "MASTER_PORT": "29500"}
    assert rank_variables.master(world(0, 1), given) == given


def test_a_reserved_port_is_free_for_who_names_it() -> None:
    port = rank_variables.reserve_port()
    assert rank_variables.reserve_port() == port
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
