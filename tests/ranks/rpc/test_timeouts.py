"""Time limits of calls: when they end, what the caller gets, and what goes on at the worker."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door, passes, wait_for

OVER = r"RPC ran for more than set timeout \(50 ms\)"


@pytest.fixture
def default(rpc: ModuleType) -> Iterator[Callable[[float], None]]:
    """Sets the default time limit, which is that of before afterwards."""
    before = rpc.get_rpc_timeout()
    yield rpc.api._set_rpc_timeout
    rpc.api._set_rpc_timeout(before)


@pytest.mark.parametrize("to", ["peer", "itself"])
def test_a_call_ends_when_its_time_is_over(hvd: ModuleType, rpc: ModuleType, peer: int, name: str, to: str) -> None:
    rank = peer if to == "peer" else hvd.rank()
    for seconds in (0.001, 0.05):
        over = rf"RPC ran for more than set timeout \({1000 * seconds:.0f} ms\)"
        with pytest.raises(RuntimeError, match=over):
            rpc.rpc_sync(rank, pass_door, (name,), timeout=seconds)
        # In wait, not at the call.
        future = rpc.rpc_async(rank, pass_door, (name,), timeout=seconds)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=over):
                future.wait()
    rpc.rpc_sync(rank, open_door, (name,))


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


def test_the_default_is_read_when_the_call_is_made(
    rpc: ModuleType, peer: int, name: str, default: Callable[[float], None]
) -> None:
    default(30)
    patient = rpc.rpc_async(peer, pass_door, (name, 7))
    default(0.05)
    assert rpc.get_rpc_timeout() == 0.05
    impatient = rpc.rpc_async(peer, pass_door, (name, 7))
    with pytest.raises(RuntimeError, match=OVER):
        rpc.rpc_sync(peer, pass_door, (name,))
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


def test_what_is_no_number_of_seconds_is_refused(rpc: ModuleType, peer: int) -> None:
    for wrong in (-0.5, float("nan"), "1", None):
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


def test_expired_calls_do_not_disturb_each_other(rpc: ModuleType, peer: int, name: str) -> None:
    calls = [rpc.rpc_async(peer, await_promise, (name,), timeout=0.001 * (1 + each % 7)) for each in range(50)]
    quick = [rpc.rpc_async(peer, max, (each, -1)) for each in range(50)]
    assert torch.futures.wait_all(quick) == list(range(50))
    for call in calls:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            call.wait()
    rpc.rpc_sync(peer, keep_promise, (name,))


@pytest.mark.mpi(min_size=2)
def test_to_here_has_a_time_limit_of_its_own(
    rpc: ModuleType, peer: int, name: str, default: Callable[[float], None]
) -> None:
    reference = rpc.remote(peer, pass_door, (name, 5))
    with pytest.raises(RuntimeError, match=OVER):
        reference.to_here(timeout=0.05)
    default(0.05)
    with pytest.raises(RuntimeError, match=OVER):
        reference.to_here()
    default(30)
    rpc.rpc_sync(peer, open_door, (name,))
    assert reference.to_here() == 5
