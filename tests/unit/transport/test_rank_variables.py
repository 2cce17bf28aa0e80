"""The variables of torchrun: what is set, what stays, and the address and port that are offered."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.transport.host import rank_variables
from hvlike.transport.host.rank_variables import Own, address_for, interfaces, set_missing, without_own

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
