"""shutdown(): it ends when all work is done, the work of others and of work that is not yet born too."""

import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import open_door, pass_door

import hvlike.rpc
from hvlike.rpc import lifecycle

HOPS = 20
_lock = threading.Lock()
_done: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done(hvd: ModuleType) -> Iterator[None]:
    """What the functions of this file note down, empty at first on every rank."""
    _done.clear()
    hvd.barrier()
    yield
    hvd.barrier()


def note(value: Any) -> Any:
    """Remember on this worker that it was called."""
    with _lock:
        _done.append(value)
    return value


def total(hvd: ModuleType) -> int:
    """How many calls were noted on all ranks."""
    return int(hvd.allreduce(torch.tensor(len(_done)), op=hvd.Sum))


def hop(hops: int, size: int, pause: float) -> None:
    """Send the chain on to the next worker, and do not wait for it."""
    time.sleep(pause)
    if hops > 1:
        me = hvlike.rpc.get_worker_info().id
        hvlike.rpc.rpc_async((me + 1) % size, hop, (hops - 1, size, pause))
    note(hops)


def call_back(caller: int, value: int) -> int:
    result: int = hvlike.rpc.rpc_sync(caller, note, (value,))
    return result


def work_slowly(seconds: float) -> None:
    time.sleep(seconds)
    note("slow")


def stay(door: str) -> None:
    """Note that it has begun, and wait."""
    note("begun")
    pass_door(door)


def start_a_thread(to: int) -> None:
    """The work goes on in a thread after the handler has returned; its call was made before."""
    future = hvlike.rpc.rpc_async(to, work_slowly, (0.05,))
    threading.Thread(target=future.wait, daemon=True).start()


@pytest.mark.parametrize("originators", ["all", "one"])
def test_a_chain_of_hops_outlives_its_originator(hvd: ModuleType, rpc: ModuleType, originators: str) -> None:
    if originators == "all" or hvd.rank() == 0:
        rpc.rpc_async((hvd.rank() + 1) % hvd.size(), hop, (HOPS, hvd.size(), 0.005))
    rpc.shutdown()
    assert total(hvd) == HOPS * (hvd.size() if originators == "all" else 1)


@pytest.mark.parametrize("limit", [30, 0.02], ids=["in time", "after its time limit"])
def test_what_still_runs_is_waited_for_where_it_runs(hvd: ModuleType, rpc: ModuleType, limit: float) -> None:
    future = rpc.rpc_async((hvd.rank() + 1) % hvd.size(), work_slowly, (0.2,), timeout=limit)
    if limit < 0.2:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            future.wait()
    # One whose answer is an error is work like any other.
    rpc.rpc_async(hvd.rank(), int, ("no number",))
    rpc.shutdown()
    assert _done == ["slow"]


def test_workers_in_shutdown_serve_one_that_still_works(hvd: ModuleType, rpc: ModuleType) -> None:
    if hvd.rank() == 0:
        for value in range(30):
            callee = value % hvd.size()
            assert rpc.rpc_sync(callee, call_back, (0, value)) == value
            time.sleep(0.005)
    rpc.shutdown()
    assert _done == (list(range(30)) if hvd.rank() == 0 else [])


def test_calls_of_callbacks_and_of_threads_are_done_first(hvd: ModuleType, rpc: ModuleType) -> None:
    to = (hvd.rank() + 1) % hvd.size()
    slow = rpc.rpc_async(to, work_slowly, (0.05,))
    slow.then(lambda future: rpc.rpc_async(to, note, ("callback",)))
    rpc.rpc_async(to, start_a_thread, ((to + 1) % hvd.size(),))
    rpc.shutdown()
    assert sorted(_done) == ["callback", "slow", "slow"]


def test_a_thread_that_hangs_does_not_keep_the_session_from_ending(hvd: ModuleType, rpc: ModuleType) -> None:
    never = threading.Event()
    orphan: torch.futures.Future[int] = torch.futures.Future()

    def hang(wait: Any) -> None:
        rpc.rpc_sync((hvd.rank() + 1) % hvd.size(), note, (1,))
        wait()

    threads = [threading.Thread(target=hang, args=(wait,), daemon=True) for wait in (never.wait, orphan.wait)]
    for thread in threads:
        thread.start()
    while len(_done) < 2:
        time.sleep(0.001)
    rpc.shutdown()
    assert all(thread.is_alive() for thread in threads)
    never.set()
    orphan.set_result(0)
    for thread in threads:
        thread.join()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports wait until all workers have said what they do, however busy the machine is."""
    monkeypatch.setattr(lifecycle, "ANSWER_SECONDS", 30.0)


@pytest.mark.mpi(min_size=2)
def test_shutdown_ends_at_its_time_limit_and_says_who_is_missing(
    hvd: ModuleType, rpc: ModuleType, patient: None
) -> None:
    if hvd.rank() > 0:
        with pytest.raises(RuntimeError, match=r"worker0 \(rank 0\) has not called shutdown"):
            rpc.shutdown(timeout=0.3)
        assert not rpc._is_current_rpc_agent_set()
    hvd.barrier()
    if hvd.rank() == 0:
        rpc.shutdown()


@pytest.mark.mpi(min_size=2)
def test_a_time_limit_names_the_function_that_is_still_running(hvd: ModuleType, rpc: ModuleType, patient: None) -> None:
    if hvd.rank() == 0:
        running = rpc.rpc_async(1, stay, ("the time limit",))
        hvd.barrier()
        with pytest.raises(RuntimeError, match=r"worker1 \(rank 1\) has served stay of worker0"):
            rpc.shutdown(timeout=0.1)
        hvd.barrier()
        with pytest.raises(RuntimeError, match="shut down"):
            running.wait()
    else:
        end = time.monotonic() + 30
        while hvd.rank() == 1 and not _done and time.monotonic() < end:
            time.sleep(0.001)
        hvd.barrier()
        hvd.barrier()
        open_door("the time limit")
        rpc.shutdown()


def test_ending_here_and_now_waits_for_nobody(hvd: ModuleType, rpc: ModuleType) -> None:
    for wrong in (-1, "soon"):
        with pytest.raises(ValueError, match="timeout"):
            rpc.shutdown(timeout=wrong)
        assert rpc._is_current_rpc_agent_set()
    future = rpc.rpc_async(hvd.rank(), pass_door, ("the end",))
    rpc.shutdown(graceful=False)
    assert not rpc._is_current_rpc_agent_set()
    with pytest.raises(RuntimeError, match="RPC has been shut down on worker"):
        future.wait()
    open_door("the end")


@pytest.mark.mpi(min_size=2)
def test_calls_to_a_worker_that_has_gone_fail_and_do_not_hang(hvd: ModuleType, rpc: ModuleType) -> None:
    last = hvd.size() - 1
    if hvd.rank() == last:
        hvd.barrier()
        rpc.shutdown(graceful=False)
        hvd.barrier()
    else:
        running = rpc.rpc_async(last, time.sleep, (1.0,))
        hvd.barrier()
        hvd.barrier()
        with pytest.raises(RuntimeError, match="shut down"):
            running.wait()
        with pytest.raises(RuntimeError, match="shut down"):
            rpc.rpc_sync(last, note, (1,))
        with pytest.raises(RuntimeError, match="shut down"):
            rpc.rpc_async(last, note, (1,)).wait()
        others = [rank for rank in range(hvd.size()) if rank != last]
        assert [rpc.rpc_sync(rank, note, (rank,)) for rank in others] == others
        rpc.shutdown()
    rpc.init_rpc(f"again{hvd.rank()}")
    assert rpc.rpc_sync(last, note, ("again",)) == "again"


def test_calls_that_wait_for_a_thread_end_with_their_session(hvd: ModuleType, rpc: ModuleType) -> None:
    rpc.shutdown()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)
    rpc.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=options)
    rpc.rpc_async(hvd.rank(), pass_door, ("of the old session",))
    rpc.rpc_async(hvd.rank(), note, ("old",))
    hvd.barrier()
    rpc.shutdown(graceful=False)
    hvd.barrier()
    rpc.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=options)
    open_door("of the old session")
    rpc.rpc_sync(hvd.rank(), note, ("new",))
    assert _done == ["new"]
