"""Time limits of calls: when they end, what the caller gets, and what goes on at the worker."""

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door, passes

OVER = r"RPC ran for more than set timeout \(50 ms\)"


@pytest.fixture
def peer(hvd: ModuleType) -> int:
    """The rank that this one calls; itself in a job of one rank."""
    return (int(hvd.rank()) + 1) % int(hvd.size())


@pytest.fixture
def name(hvd: ModuleType, request: pytest.FixtureRequest) -> str:
    """A door at which only calls of this rank in this test wait."""
    return f"{request.node.name} {hvd.rank()}"


@pytest.fixture
def default(rpc: ModuleType) -> Iterator[Callable[[float], None]]:
    """Sets the default time limit, which is that of before afterwards."""
    before = rpc.get_rpc_timeout()
    yield rpc.api._set_rpc_timeout
    rpc.api._set_rpc_timeout(before)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Slow:
    """Its making waits at a door."""

    def __init__(self, name: str) -> None:
        pass_door(name)

    def number(self) -> int:
        return 3


def test_defaults_are_sixty_seconds(rpc: ModuleType) -> None:
    assert rpc.get_rpc_timeout() == 60.0


def test_rpc_sync_raises_when_its_time_is_over(rpc: ModuleType, peer: int, name: str) -> None:
    with pytest.raises(RuntimeError, match=OVER):
        rpc.rpc_sync(peer, pass_door, (name,), timeout=0.05)
    rpc.rpc_sync(peer, open_door, (name,))


def test_rpc_async_raises_in_wait_and_not_at_the_call(rpc: ModuleType, peer: int, name: str) -> None:
    future = rpc.rpc_async(peer, pass_door, (name,), timeout=0.05)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=OVER):
            future.wait()
    rpc.rpc_sync(peer, open_door, (name,))


def test_one_millisecond_fires(rpc: ModuleType, peer: int, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(1 ms\)"):
        rpc.rpc_sync(peer, pass_door, (name,), timeout=0.001)
    with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(1 ms\)"):
        rpc.rpc_async(peer, pass_door, (name,), timeout=0.001).wait()
    rpc.rpc_sync(peer, open_door, (name,))


def test_calls_to_oneself_have_time_limits_too(hvd: ModuleType, rpc: ModuleType, name: str) -> None:
    with pytest.raises(RuntimeError, match=OVER):
        rpc.rpc_sync(hvd.rank(), pass_door, (name,), timeout=0.05)
    open_door(name)


def test_calls_from_inside_a_function_have_time_limits_too(
    hvd: ModuleType, rpc: ModuleType, peer: int, name: str
) -> None:
    assert rpc.rpc_sync(peer, over_there, (hvd.rank(), name))
    open_door(name)


def over_there(rank: int, name: str) -> bool:
    import hvlike.rpc

    with pytest.raises(RuntimeError, match=OVER):
        hvlike.rpc.rpc_sync(rank, pass_door, (name,), timeout=0.05)
    return True


def test_the_default_counts_where_none_is_given(
    rpc: ModuleType, peer: int, name: str, default: Callable[[float], None]
) -> None:
    default(0.05)
    assert rpc.get_rpc_timeout() == 0.05
    with pytest.raises(RuntimeError, match=OVER):
        rpc.rpc_sync(peer, pass_door, (name,))
    with pytest.raises(RuntimeError, match=OVER):
        rpc.rpc_async(peer, pass_door, (name,)).wait()
    rpc.rpc_sync(peer, open_door, (name,), timeout=30)


def test_the_default_is_read_when_the_call_is_made(
    rpc: ModuleType, peer: int, name: str, default: Callable[[float], None]
) -> None:
    default(30)
    patient = rpc.rpc_async(peer, pass_door, (name, 7))
    default(0.05)
    impatient = rpc.rpc_async(peer, pass_door, (name, 7))
    default(30)
    with pytest.raises(RuntimeError, match=OVER):
        impatient.wait()
    assert not patient.done()
    rpc.rpc_sync(peer, open_door, (name,))
    assert patient.wait() == 7


def test_zero_is_no_limit(rpc: ModuleType, peer: int, name: str, default: Callable[[float], None]) -> None:
    default(0.05)
    unlimited = rpc.rpc_async(peer, pass_door, (name, 7), timeout=0)
    limited = rpc.rpc_async(peer, pass_door, (name, 7))
    with pytest.raises(RuntimeError, match=OVER):
        limited.wait()
    assert not unlimited.done()
    default(0)
    also_unlimited = rpc.rpc_async(peer, open_door, (name,))
    also_unlimited.wait()
    assert unlimited.wait() == 7


@pytest.mark.parametrize("wrong", [-0.5, float("nan"), "1", None])
def test_what_is_no_number_of_seconds_is_refused(rpc: ModuleType, peer: int, wrong: Any) -> None:
    for form in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(ValueError, match="timeout"):
            form(peer, min, (1, 2), timeout=wrong)


def test_the_function_goes_on_and_its_late_result_is_dropped(
    hvd: ModuleType, rpc: ModuleType, peer: int, name: str
) -> None:
    late = rpc.rpc_async(peer, pass_door, (name, torch.ones(3)), timeout=0.05)
    with pytest.raises(RuntimeError, match=OVER):
        late.wait()
    assert rpc.rpc_sync(peer, passes, (name,)) == 0
    rpc.rpc_sync(peer, open_door, (name,))
    wait_for(lambda: bool(rpc.rpc_sync(peer, passes, (name,)) == 1))
    for number in range(20):
        assert rpc.rpc_sync(peer, max, (number, -1)) == number
    with pytest.raises(RuntimeError, match=OVER):
        late.wait()


def test_the_late_error_is_dropped_too(rpc: ModuleType, peer: int, name: str) -> None:
    late = rpc.rpc_async(peer, await_promise, (name,), timeout=0.05)
    with pytest.raises(RuntimeError, match=OVER):
        late.wait()
    # What cannot be pickled makes the late answer an error.
    rpc.rpc_sync(peer, keep_promise_badly, (name,))
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1


def keep_promise_badly(name: str) -> None:
    keep_promise(name, lambda: None)


def test_expired_calls_do_not_disturb_each_other(rpc: ModuleType, peer: int, name: str) -> None:
    calls = [rpc.rpc_async(peer, await_promise, (name,), timeout=0.001 * (1 + each % 7)) for each in range(50)]
    quick = [rpc.rpc_async(peer, max, (each, -1)) for each in range(50)]
    assert torch.futures.wait_all(quick) == list(range(50))
    for call in calls:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            call.wait()
    rpc.rpc_sync(peer, keep_promise, (name,))


@pytest.mark.mpi(min_size=2)
def test_to_here_has_a_time_limit_of_its_own(rpc: ModuleType, peer: int, name: str) -> None:
    reference = rpc.remote(peer, pass_door, (name, 5))
    with pytest.raises(RuntimeError, match=OVER):
        reference.to_here(timeout=0.05)
    rpc.rpc_sync(peer, open_door, (name,))
    assert reference.to_here() == 5


@pytest.mark.mpi(min_size=2)
def test_to_here_reads_the_default_when_it_is_called(
    rpc: ModuleType, peer: int, name: str, default: Callable[[float], None]
) -> None:
    reference = rpc.remote(peer, pass_door, (name, 5))
    default(0.05)
    with pytest.raises(RuntimeError, match=OVER):
        reference.to_here()
    default(30)
    rpc.rpc_sync(peer, open_door, (name,))
    assert reference.to_here() == 5


def test_proxies_have_time_limits_that_cover_the_look_up_of_the_type(rpc: ModuleType, peer: int, name: str) -> None:
    reference = rpc.remote(peer, Slow, (name,))
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        reference.rpc_sync(timeout=0.05).number()
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        reference.rpc_async(timeout=0.05).number().wait()
    with pytest.raises(RuntimeError, match=r"RPC ran for more than|RRef creation"):
        reference.remote(timeout=0.05).number().to_here()
    rpc.rpc_sync(peer, open_door, (name,))
    assert reference.rpc_sync().number() == 3
    assert reference.rpc_async().number().wait() == 3


@pytest.mark.mpi(min_size=2)
def test_an_rref_whose_creation_ran_out_of_time_is_of_no_use(
    hvd: ModuleType, rpc: ModuleType, peer: int, name: str
) -> None:
    # Its creation is not acknowledged while the functions of others take all threads of the worker.
    taken = [rpc.rpc_async(peer, pass_door, (name,)) for _ in range(20)]
    reference = rpc.remote(peer, max, (1, 2), timeout=0.05)
    with pytest.raises(RuntimeError, match=OVER):
        reference._get_future().wait()
    with pytest.raises(RuntimeError, match="RRef creation"):
        reference.to_here()
    with pytest.raises(RuntimeError, match="RRef creation"):
        rpc.rpc_async(peer, min, (reference, 1))
    hvd.barrier()
    open_door(name.replace(str(hvd.rank()), str((hvd.rank() - 1) % hvd.size())))
    torch.futures.wait_all(taken)
