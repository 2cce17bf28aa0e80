"""Handles: poll and synchronize as in Horovod, wait, done and result as in a future."""

import threading
import time
from types import ModuleType

import pytest
import torch

from hvlike.errors import UnknownHandleError


def test_poll_turns_true_and_then_synchronize_returns_at_once(hvd: ModuleType) -> None:
    handle = hvd.allreduce_async(torch.ones(5), op=hvd.Sum)
    end = time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < end, "poll makes no progress"
    assert handle.done()
    assert hvd.synchronize(handle).tolist() == [float(hvd.size())] * 5


@pytest.mark.mpi(min_size=2)
def test_nothing_is_done_before_the_last_rank_has_asked(hvd: ModuleType) -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(5), name="late", op=hvd.Sum)
        assert not hvd.poll(handle)
        assert handle.wait(0.05) is False
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.05 s"):
            handle.result(0.05)
        assert not handle.done()
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(5), name="late", op=hvd.Sum)
    assert handle.wait() is True
    assert handle.done()
    assert handle.result().tolist() == [float(hvd.size())] * 5
    assert handle.result() is handle.result(0)
    assert handle.wait(0) is True


@pytest.mark.mpi(min_size=2)
def test_the_work_goes_on_while_nobody_waits(hvd: ModuleType) -> None:
    handle = hvd.allreduce_async(torch.ones(5), op=hvd.Sum)
    end = time.monotonic() + 60
    while not handle.done() and time.monotonic() < end:
        time.sleep(0.005)
    assert handle.done()
    hvd.synchronize(handle)


def test_a_handle_is_forgotten_by_synchronize(hvd: ModuleType) -> None:
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    for call in (hvd.synchronize, hvd.poll):
        with pytest.raises(UnknownHandleError, match=f"Handle {handle.number} was not created or has been cleared"):
            call(handle)


@pytest.mark.parametrize("what", [7, None, "handle", torch.ones(1)], ids=repr)
def test_what_is_no_handle_is_refused(hvd: ModuleType, what: object) -> None:
    for call in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            call(what)


@pytest.mark.mpi(min_size=2)
def test_a_thread_beside_a_waiting_one_is_not_held_up(hvd: ModuleType) -> None:
    # On rank 0 one thread waits, and drives the loop; what the other one does must not wait for its next look.
    waiting = threading.Event()

    def wait() -> None:
        handle = hvd.allreduce_async(torch.ones(3), name="late", op=hvd.Sum)
        waiting.set()
        hvd.synchronize(handle)

    thread = threading.Thread(target=wait)
    if hvd.rank() == 0:
        thread.start()
        waiting.wait()
        time.sleep(0.05)
    taken = []
    for _ in range(12):
        started = time.monotonic()
        hvd.barrier()
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="grad")
        hvd.allreduce(torch.ones(2), name="grad")
        taken.append(time.monotonic() - started)
    # Held up it would be a quarter of a second for each of the three. A busy machine makes some slow, not all.
    assert min(taken) < 0.3
    if hvd.rank() > 0:
        thread.start()
    thread.join()


def test_a_handle_says_what_it_is(hvd: ModuleType) -> None:
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    assert repr(handle) == f"Operation({handle.number}, done)"
