"""Sessions of RPC: how they begin, what they refuse, and that they begin again."""

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import hvlike.rpc
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.rpc.agent.agent import Agent


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


def introduce(caller: str) -> tuple[str, int, str]:
    """What a handler sees of its worker, and what its caller answers to a call from inside."""
    me = hvlike.rpc.get_worker_info()
    back: str = hvlike.rpc.rpc_sync(caller, whoami)
    return me.name, hvlike.rpc.get_worker_info(caller).id, back


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


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_outside_of_a_session_every_call_says_so(outside: ModuleType, name: str, moment: str) -> None:
    if moment == "after":
        outside.init_rpc(f"worker{hvlike.rank()}")
        outside.shutdown()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        CALLS[name](outside)


def test_outside_of_a_session_there_is_no_rref(outside: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Current RPC agent is not set!"):
        outside.RRef(torch.ones(2))


def test_a_second_start_is_refused_and_the_session_goes_on(hvd: ModuleType, rpc: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="is already initialized"):
        rpc.init_rpc(f"worker{hvd.rank()}")
    with pytest.raises(RuntimeError, match="is already initialized"):
        rpc.init_rpc("another")
    assert rpc.rpc_sync((hvd.rank() + 1) % hvd.size(), whoami) == f"worker{(hvd.rank() + 1) % hvd.size()}"


def test_sessions_follow_each_other_under_the_same_and_other_names(hvd: ModuleType, outside: ModuleType) -> None:
    for names in ("worker", "worker", "trainer", "worker"):
        outside.init_rpc(f"{names}{hvd.rank()}")
        for rank in range(hvd.size()):
            assert outside.rpc_sync(f"{names}{rank}", whoami) == f"{names}{rank}"
            assert outside.rpc_async(rank, whoami).wait() == f"{names}{rank}"
        stranger = "worker0" if names == "trainer" else "trainer0"
        with pytest.raises(RuntimeError, match="could not find destination"):
            outside.rpc_sync(stranger, whoami)
        outside.shutdown()


def test_names_may_be_anything_in_any_order(hvd: ModuleType, outside: ModuleType) -> None:
    name = f"é {hvd.size() - hvd.rank()}: ps/ü"
    outside.init_rpc(name)
    assert outside.get_worker_info().name == name
    assert outside.rpc_sync(f"é {hvd.size()}: ps/ü", whoami) == f"é {hvd.size()}: ps/ü"


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


def test_rank_and_world_size_may_be_given(hvd: ModuleType, outside: ModuleType) -> None:
    outside.init_rpc(f"worker{hvd.rank()}", rank=hvd.rank(), world_size=hvd.size())
    assert outside.get_worker_info().id == hvd.rank()


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


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_that_is_none_is_refused(hvd: ModuleType, outside: ModuleType, name: Any) -> None:
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


def test_collectives_run_beside_calls(hvd: ModuleType, rpc: ModuleType) -> None:
    futures = [rpc.rpc_async(rank, whoami) for rank in range(hvd.size())]
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    assert [future.wait() for future in futures] == [f"worker{rank}" for rank in range(hvd.size())]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", ["before it takes messages", "after"])
def test_requests_wait_for_a_worker_that_is_still_in_init_rpc(
    hvd: ModuleType, outside: ModuleType, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    begin = Agent.begin

    def slow(agent: Agent) -> None:
        if late == "after":
            begin(agent)
        time.sleep(0.3)
        if late != "after":
            begin(agent)

    if hvd.rank() > 0:
        monkeypatch.setattr(Agent, "begin", slow)
    outside.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        callees = range(1, hvd.size())
        futures = [outside.rpc_async(rank, introduce, ("worker0",)) for rank in callees for _ in range(5)]
        assert [future.wait() for future in futures] == [
            (f"worker{rank}", 0, "worker0") for rank in callees for _ in range(5)
        ]


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
