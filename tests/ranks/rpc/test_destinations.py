"""Whom a call is for: by name, by rank or by WorkerInfo, from everywhere; and who does not exist."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import hvlike.rpc
from hvlike.rpc import WorkerInfo

FORMS: dict[str, Callable[[ModuleType, Any, Callable[..., Any], tuple[Any, ...]], Any]] = {
    "sync": lambda rpc, to, func, args: rpc.rpc_sync(to, func, args),
    "async": lambda rpc, to, func, args: rpc.rpc_async(to, func, args).wait(),
    "remote": lambda rpc, to, func, args: rpc.remote(to, func, args).to_here(),
}
WAYS: dict[str, Callable[[ModuleType, int], Any]] = {
    "name": lambda rpc, rank: f"worker{rank}",
    "rank": lambda rpc, rank: rank,
    "info": lambda rpc, rank: rpc.get_worker_info(f"worker{rank}"),
    "own info": lambda rpc, rank: WorkerInfo(f"worker{rank}", rank),
}


def whoami() -> tuple[str, int]:
    me = hvlike.rpc.get_worker_info()
    return me.name, me.id


def ask_from_there(form: str, way: str, rank: int) -> tuple[str, int]:
    """Runs on a worker, and calls another one, or itself, from inside the handler."""
    answer: tuple[str, int] = FORMS[form](hvlike.rpc, WAYS[way](hvlike.rpc, rank), whoami, ())
    return answer


def echo(value: Any) -> Any:
    return value


def look_up(table: dict[WorkerInfo, str]) -> str:
    return table[hvlike.rpc.get_worker_info()]


@pytest.fixture(params=sorted(FORMS))
def call(rpc: ModuleType, request: pytest.FixtureRequest) -> Callable[..., Any]:
    form = FORMS[request.param]
    return lambda to, func, *args: form(rpc, to, func, args)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_worker_is_reached(hvd: ModuleType, rpc: ModuleType, call: Callable[..., Any], way: str) -> None:
    for rank in range(hvd.size()):
        assert call(WAYS[way](rpc, rank), whoami) == (f"worker{rank}", rank)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_worker_is_reached_from_inside_a_handler(hvd: ModuleType, rpc: ModuleType, form: str, way: str) -> None:
    next_rank = (hvd.rank() + 1) % hvd.size()
    for rank in range(hvd.size()):
        assert rpc.rpc_sync(next_rank, ask_from_there, (form, way, rank)) == (f"worker{rank}", rank)


@pytest.mark.parametrize("unknown", ["worker", "Worker0", "", -1, "size", "size + 1", 2**40, "info"])
def test_an_unknown_worker_is_named_at_the_call(
    hvd: ModuleType, rpc: ModuleType, call: Callable[..., Any], unknown: Any
) -> None:
    to = {"size": hvd.size(), "size + 1": hvd.size() + 1, "info": WorkerInfo("far", hvd.size())}.get(unknown, unknown)
    with pytest.raises(RuntimeError, match="could not find destination"):
        call(to, whoami)
    with pytest.raises(RuntimeError, match="could not find destination"):
        rpc.get_worker_info(to)


@pytest.mark.parametrize("form", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("wrong", [1.5, None, (0,), b"worker0"])
def test_other_types_are_refused_at_the_call(rpc: ModuleType, form: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
        getattr(rpc, form)(wrong, whoami)


def test_a_refused_call_disturbs_nothing(hvd: ModuleType, rpc: ModuleType, call: Callable[..., Any]) -> None:
    for to in (-1, hvd.size(), "nobody"):
        with pytest.raises(RuntimeError):
            call(to, whoami)
    assert call(0, whoami) == ("worker0", 0)


def test_worker_infos(hvd: ModuleType, rpc: ModuleType) -> None:
    me = rpc.get_worker_info()
    assert (me.name, me.id) == (f"worker{hvd.rank()}", hvd.rank())
    assert str(me) == f"WorkerInfo(id={hvd.rank()}, name=worker{hvd.rank()})"
    for rank in range(hvd.size()):
        there = rpc.get_worker_info(f"worker{rank}")
        assert (there.name, there.id) == (f"worker{rank}", rank)
        assert (there == me) is (rank == hvd.rank())
        assert (there != me) is (rank != hvd.rank())


def test_worker_infos_are_values(hvd: ModuleType, rpc: ModuleType) -> None:
    me, again = rpc.get_worker_info(), rpc.get_worker_info(f"worker{hvd.rank()}")
    assert me == again
    assert hash(me) == hash(again)
    assert {me: "found"}[again] == "found"
    assert me not in (me.name, me.id, (me.name, me.id), None)


def test_worker_infos_travel(hvd: ModuleType, rpc: ModuleType, call: Callable[..., Any]) -> None:
    table = {rpc.get_worker_info(f"worker{rank}"): f"value {rank}" for rank in range(hvd.size())}
    for rank in range(hvd.size()):
        assert call(rank, look_up, table) == f"value {rank}"
        assert call(rank, echo, rpc.get_worker_info()) == rpc.get_worker_info()
