"""shutdown(): it ends when all work is done, the work of others and of work that is not yet born too."""

import gc
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
from hvlike.rpc.rrefs.session import current_session

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


def tree(depth: int, size: int) -> None:
    """Start two calls that nobody waits for, each of which starts two more."""
    note(depth)
    for child in range(2 if depth else 0):
        hvlike.rpc.rpc_async((depth + child) % size, tree, (depth - 1, size))


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


@pytest.mark.parametrize("pause", [0.0, 0.005])
@pytest.mark.parametrize("originators", ["all", "one"])
def test_a_chain_of_hops_outlives_its_originator(
    hvd: ModuleType, rpc: ModuleType, pause: float, originators: str
) -> None:
    if originators == "all" or hvd.rank() == 0:
        rpc.rpc_async((hvd.rank() + 1) % hvd.size(), hop, (HOPS, hvd.size(), pause))
    rpc.shutdown()
    assert total(hvd) == HOPS * (hvd.size() if originators == "all" else 1)


def test_a_growing_tree_of_calls_is_finished(hvd: ModuleType, rpc: ModuleType) -> None:
    rpc.rpc_async(0, tree, (6, hvd.size()))
    rpc.shutdown()
    assert total(hvd) == 127 * hvd.size()


def test_workers_in_shutdown_serve_one_that_still_works(hvd: ModuleType, rpc: ModuleType) -> None:
    if hvd.rank() == 0:
        for value in range(30):
            callee = value % hvd.size()
            assert rpc.rpc_sync(callee, call_back, (0, value)) == value
            time.sleep(0.005)
    rpc.shutdown()
    assert _done == (list(range(30)) if hvd.rank() == 0 else [])


@pytest.mark.mpi(min_size=2)
def test_uneven_work_is_finished_however_it_is_spread(hvd: ModuleType, rpc: ModuleType) -> None:
    for value in range(hvd.rank() * 20):
        rpc.rpc_async(value % hvd.size(), note, (value,))
    time.sleep(0.05 * hvd.rank())
    rpc.shutdown()
    assert total(hvd) == 20 * sum(range(hvd.size()))


def test_a_function_that_still_runs_is_waited_for(hvd: ModuleType, rpc: ModuleType) -> None:
    rpc.rpc_async((hvd.rank() + 1) % hvd.size(), work_slowly, (0.2,))
    rpc.shutdown()
    assert _done == ["slow"]


def test_a_call_whose_answer_is_an_error_is_work_like_any_other(hvd: ModuleType, rpc: ModuleType) -> None:
    for rank in range(hvd.size()):
        rpc.rpc_async(rank, int, ("no number",))
    rpc.rpc_async(0, note, (1,))
    rpc.shutdown()
    assert total(hvd) == hvd.size()


def test_a_call_that_has_timed_out_is_still_waited_for_where_it_runs(hvd: ModuleType, rpc: ModuleType) -> None:
    future = rpc.rpc_async((hvd.rank() + 1) % hvd.size(), work_slowly, (0.2,), timeout=0.02)
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        future.wait()
    rpc.shutdown()
    assert _done == ["slow"]


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


@pytest.mark.mpi(min_size=2)
def test_references_that_python_still_holds_end_with_the_session(hvd: ModuleType, rpc: ModuleType) -> None:
    owner = (hvd.rank() + 1) % hvd.size()
    held = rpc.remote(owner, torch.ones, (3,))
    cycle: list[Any] = [rpc.remote(owner, torch.ones, (4,))]
    cycle.append(cycle)
    assert held.to_here().sum() == 3
    # Leak checking is on: what the owner were not told of would be an error.
    rpc.shutdown()
    for rref in (held, cycle[0]):
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion"):
            rref.to_here()
    del held, cycle, rref
    gc.collect()


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


@pytest.mark.parametrize("wrong", [-1, "soon"])
def test_a_time_limit_that_is_none_is_refused(rpc: ModuleType, wrong: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        rpc.shutdown(timeout=wrong)
    assert rpc._is_current_rpc_agent_set()


def test_ending_here_and_now_waits_for_nobody(hvd: ModuleType, rpc: ModuleType) -> None:
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


@pytest.mark.mpi(min_size=2)
def test_values_are_not_kept_for_a_worker_that_has_gone(hvd: ModuleType, rpc: ModuleType) -> None:
    last = hvd.size() - 1
    if hvd.rank() == last:
        held = rpc.remote(0, torch.ones, (3,))
        assert held.to_here().sum() == 3
        hvd.barrier()
        rpc.shutdown(graceful=False)
        hvd.barrier()
    else:
        hvd.barrier()
        if hvd.rank() == 0:
            until = time.monotonic() + 30
            while (left := current_session().debug_info()["num_owner_rrefs"]) != "0":
                assert time.monotonic() < until, f"{left} values are left"
                time.sleep(0.001)
        hvd.barrier()
        rpc.shutdown()


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
