"""Sessions of RPC: how they begin, what they refuse, that they begin again, and how their workers are called."""

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.forms import FORMS

import hvlike.rpc
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.rpc import WorkerInfo


@pytest.fixture
def outside(hvd: ModuleType) -> Iterator[ModuleType]:
    """hvlike.rpc without a session; the test may begin one."""
    hvlike.rpc.api._set_leak_checking(True)
    yield hvlike.rpc
    if hvlike.rpc._is_current_rpc_agent_set():
        hvlike.rpc.shutdown(timeout=60)


def whoami() -> str:
    name: str = hvlike.rpc.get_worker_info().name
    return name


CALLS: dict[str, Callable[[ModuleType], Any]] = {
    "rpc_sync": lambda rpc: rpc.rpc_sync(0, whoami),
    "rpc_sync to a name": lambda rpc: rpc.rpc_sync("worker0", whoami),
    "rpc_async": lambda rpc: rpc.rpc_async(0, whoami),
    "remote": lambda rpc: rpc.remote(0, whoami),
    "get_worker_info": lambda rpc: rpc.get_worker_info(),
    "get_worker_info of a name": lambda rpc: rpc.get_worker_info("worker0"),
    "get_rpc_timeout": lambda rpc: rpc.get_rpc_timeout(),
    "_set_rpc_timeout": lambda rpc: rpc._set_rpc_timeout(5),
    "_get_debug_info": lambda rpc: rpc._get_debug_info(),
    "_all_gather": lambda rpc: rpc._all_gather(1),
    "_barrier": lambda rpc: rpc._barrier({"worker0"}),
    "shutdown": lambda rpc: rpc.shutdown(),
    "shutdown, not graceful": lambda rpc: rpc.shutdown(graceful=False),
}


def test_outside_of_a_session_every_call_says_so(outside: ModuleType) -> None:
    for moment in ("before", "after"):
        if moment == "after":
            outside.init_rpc(f"worker{hvlike.rank()}")
            outside.shutdown()
        for name, call in CALLS.items():
            with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
                pytest.fail(f"{name} {moment}: {call(outside)}")
        with pytest.raises(RuntimeError, match="Current RPC agent is not set!"):
            outside.RRef(torch.ones(2))


def test_a_second_start_is_refused_and_the_session_goes_on(hvd: ModuleType, rpc: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="is already initialized"):
        rpc.init_rpc(f"worker{hvd.rank()}")
    with pytest.raises(RuntimeError, match="is already initialized"):
        rpc.init_rpc("another")
    assert rpc.rpc_sync((hvd.rank() + 1) % hvd.size(), whoami) == f"worker{(hvd.rank() + 1) % hvd.size()}"


def test_sessions_follow_each_other_under_the_same_and_other_names(hvd: ModuleType, outside: ModuleType) -> None:
    for names in ("worker", "worker", "é: ps/ü ", "worker"):
        outside.init_rpc(f"{names}{hvd.rank()}", rank=hvd.rank(), world_size=hvd.size())
        assert outside.get_worker_info() == WorkerInfo(f"{names}{hvd.rank()}", hvd.rank())
        for rank in range(hvd.size()):
            assert outside.rpc_sync(f"{names}{rank}", whoami) == f"{names}{rank}"
            assert outside.rpc_async(rank, whoami).wait() == f"{names}{rank}"
        stranger = "trainer0" if names == "worker" else "worker0"
        with pytest.raises(RuntimeError, match="could not find destination"):
            outside.rpc_sync(stranger, whoami)
        outside.shutdown()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("twins", ["all", "first and last"])
def test_names_that_are_not_unique_are_refused_on_every_rank(hvd: ModuleType, outside: ModuleType, twins: str) -> None:
    same = twins == "all" or hvd.rank() in (0, hvd.size() - 1)
    with pytest.raises(RuntimeError, match=r"twin.* is not unique"):
        outside.init_rpc("twin" if same else f"worker{hvd.rank()}")
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        outside.rpc_sync(0, whoami)
    outside.init_rpc(f"worker{hvd.rank()}")
    assert outside.rpc_sync(0, whoami) == "worker0"


@pytest.mark.parametrize("argument", ["rank", "world_size"])
def test_another_rank_or_size_than_that_of_mpi_is_refused_on_every_rank(
    hvd: ModuleType, outside: ModuleType, argument: str
) -> None:
    last = hvd.rank() == hvd.size() - 1
    given = {argument: hvd.size() + 1} if last else {}
    expected: type[Exception] = UsageError if last else HorovodInternalError
    with pytest.raises(expected, match=f"{argument}={hvd.size() + 1} was given"):
        outside.init_rpc(f"worker{hvd.rank()}", **given)
    outside.init_rpc(f"worker{hvd.rank()}")
    assert outside.rpc_sync(hvd.size() - 1, whoami) == f"worker{hvd.size() - 1}"


def test_a_name_that_is_none_is_refused(hvd: ModuleType, outside: ModuleType) -> None:
    for name in ("", None, 3):
        with pytest.raises(UsageError, match="name must be a str"):
            outside.init_rpc(name)
        assert not outside._is_current_rpc_agent_set()


def test_init_rpc_starts_hvlike_where_it_does_not_run(hvd: ModuleType, outside: ModuleType) -> None:
    rank = hvd.rank()
    hvd.shutdown()
    outside.init_rpc(f"worker{rank}")
    assert hvd.is_initialized()
    assert outside.rpc_sync(0, whoami) == "worker0"
    outside.shutdown()
    assert hvd.is_initialized()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_a_new_start_of_hvlike_ends_the_session(hvd: ModuleType, outside: ModuleType) -> None:
    outside.init_rpc(f"worker{hvd.rank()}")
    assert outside.rpc_sync(0, whoami) == "worker0"
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        outside.rpc_sync(0, whoami)
    hvd.init()
    outside.init_rpc(f"again{hvd.rank()}")
    assert outside.rpc_sync(0, whoami) == "again0"


def test_defaults_and_settings(hvd: ModuleType, outside: ModuleType) -> None:
    outside.init_rpc(f"worker{hvd.rank()}")
    assert outside.get_rpc_timeout() == 60.0
    assert outside._get_debug_info()["agent.thread_pool_size"] == "16"
    outside._set_rpc_timeout(7.5)
    assert outside.get_rpc_timeout() == 7.5
    outside.shutdown()
    options = outside.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=11)
    outside.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=options)
    assert outside.get_rpc_timeout() == 11
    assert outside._get_debug_info()["agent.thread_pool_size"] == "4"
    outside.shutdown()
    outside.init_rpc(f"worker{hvd.rank()}", rpc_timeout=5, num_worker_threads=3)
    assert outside.get_rpc_timeout() == 5
    assert outside._get_debug_info()["agent.thread_pool_size"] == "3"


def test_sessions_leave_no_thread_behind(hvd: ModuleType, outside: ModuleType) -> None:
    for _ in range(3):
        outside.init_rpc(f"worker{hvd.rank()}")
        for future in [outside.rpc_async(rank, whoami) for rank in range(hvd.size()) for _ in range(20)]:
            future.wait()
        outside.shutdown()
    deadline = time.monotonic() + 20
    while len(left := loop_threads()) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(left) == 1


def loop_threads() -> list[str]:
    """The background threads of this rank: one without a session, more while requests are served."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hvlike-loop")]


# -- whom a call is for ------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[int], Any]] = {
    "name": lambda rank: f"worker{rank}",
    "rank": lambda rank: rank,
    "info": lambda rank: hvlike.rpc.get_worker_info(f"worker{rank}"),
    "own info": lambda rank: WorkerInfo(f"worker{rank}", rank),
}


def ask(form: str, way: str, rank: int) -> str:
    """What a worker says to this one."""
    answer: str = FORMS[form](WAYS[way](rank), whoami)
    return answer


def look_up(table: dict[WorkerInfo, str]) -> str:
    return table[hvlike.rpc.get_worker_info()]


def test_every_worker_is_reached_also_from_inside_a_handler(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    for rank in range(hvd.size()):
        for form in FORMS:
            for way in WAYS:
                assert ask(form, way, rank) == f"worker{rank}"
                assert rpc.rpc_sync(peer, ask, (form, way, rank)) == f"worker{rank}"


def test_who_is_not_there_is_named_at_the_call(hvd: ModuleType, rpc: ModuleType) -> None:
    size = hvd.size()
    for unknown in ("worker", "Worker0", "", -1, size, size + 1, 2**40, WorkerInfo("far", size)):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, lambda to, _: rpc.get_worker_info(to)):
            with pytest.raises(RuntimeError, match="could not find destination"):
                call(unknown, whoami)
    for wrong in (1.5, None, (0,), b"worker0"):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
                call(wrong, whoami)
    assert rpc.rpc_sync(0, whoami) == "worker0"


def test_worker_infos_are_values_and_travel(hvd: ModuleType, rpc: ModuleType) -> None:
    me, again = rpc.get_worker_info(), rpc.get_worker_info(f"worker{hvd.rank()}")
    assert (me.name, me.id) == (f"worker{hvd.rank()}", hvd.rank())
    assert str(me) == f"WorkerInfo(id={hvd.rank()}, name=worker{hvd.rank()})"
    assert me == again
    assert hash(me) == hash(again)
    assert me not in (me.name, me.id, (me.name, me.id), None)
    table = {rpc.get_worker_info(f"worker{rank}"): f"value {rank}" for rank in range(hvd.size())}
    for rank in range(hvd.size()):
        there = rpc.get_worker_info(f"worker{rank}")
        assert (there == me, there != me) == (rank == hvd.rank(), rank != hvd.rank())
        for form in FORMS.values():
            assert form(rank, look_up, (table,)) == f"value {rank}"
            assert form(rank, min, ([me],)) == me
