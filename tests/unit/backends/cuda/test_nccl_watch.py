"""What goes wrong in NCCL while nobody waits there is found, ends what is under way, and is raised to whoever asks."""

import threading
import time

import pytest
import torch
from support.backends.fake_nccl import FakeNccl
from support.backends.late_device import LateDevice

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import SoloBackend
from hvlike.backends.cuda import nccl
from hvlike.backends.cuda.nccl import Communicator, Nccl, NcclBackend
from hvlike.errors import HorovodInternalError, ShutdownError, StalledError

LIMIT = 5.0


class Alone:
    """A meeting of one."""

    def allgather(self, value: object) -> list[object]:
        return [value]


class Setting:
    """A backend of one rank, and what it stands on."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.device = LateDevice()
        self.nccl = FakeNccl(self.device, lambda number, rank, size: Alone())
        self.link = self.nccl.join(Alone(), 0, 1)
        communicator = Communicator(Nccl(self.nccl), self.link)
        self.backend = NcclBackend(SoloBackend(), self.device, self.device.home(), (0, 1), communicator, limit)

    def reduce(self, tensor: torch.Tensor) -> None:
        """Begin a reduction."""
        job = self.backend.allreduce([tensor], Arithmetic(torch.float32, ReduceOp.SUM, postscale=3.0))
        assert list(self.backend.run(job)) == []


def test_a_call_that_takes_too_long_is_an_error() -> None:
    setting = Setting()
    setting.reduce(torch.ones(3))
    now = time.monotonic()
    assert setting.backend.watch(now) is None
    # The device may still have been asked for nothing: the second question sets it off.
    late = Setting()
    late.reduce(torch.ones(3))
    error = late.backend.watch(now + 2 * LIMIT + 100)
    assert isinstance(error, StalledError)
    assert "HVLIKE_NCCL_TIMEOUT_SECONDS" in str(error)


def test_without_a_limit_it_may_take_any_time() -> None:
    setting = Setting(limit=0.0)
    setting.reduce(torch.ones(3))
    assert setting.backend.watch(time.monotonic() + 1e9) is None


def test_what_has_ended_is_not_late() -> None:
    setting = Setting()
    tensor = torch.ones(3)
    setting.reduce(tensor)
    setting.device.drain(setting.backend.stream)
    assert torch.equal(tensor, torch.full((3,), 3.0))
    assert setting.backend.watch(time.monotonic() + 100 * LIMIT) is None


def test_an_error_of_nccl_is_found_once_and_told_with_advice() -> None:
    setting = Setting()
    setting.link.failure = RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error")
    error = setting.backend.watch(time.monotonic())
    assert isinstance(error, HorovodInternalError)
    assert "unhandled cuda error" in str(error)
    assert "NCCL_DEBUG=INFO" in str(error)
    setting.backend.abort(error)
    assert setting.backend.watch(time.monotonic()) is None


def test_after_an_abort_everybody_gets_the_error() -> None:
    setting = Setting()
    fence = setting.backend.fence()
    error = HorovodInternalError("rank 1 has gone")
    setting.backend.abort(error)
    setting.backend.abort(HorovodInternalError("and later something else"))
    assert setting.link.aborted.wait(60.0)
    with pytest.raises(HorovodInternalError, match="rank 1 has gone"):
        fence()
    with pytest.raises(HorovodInternalError, match="rank 1 has gone"):
        setting.reduce(torch.ones(3))
    assert not setting.link.calls


def test_an_error_that_stays_on_the_device_is_told_and_does_not_leave_the_loop() -> None:
    setting = Setting()
    setting.reduce(torch.ones(3))

    def failing(event: object) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered\nSearch for it in the documentation")

    setting.device.has_passed = failing
    error = setting.backend.watch(time.monotonic())
    assert isinstance(error, HorovodInternalError)
    assert str(error) == "cpu has failed: CUDA error: device-side assert triggered"


def test_the_end_of_hvlike_lets_what_is_under_way_finish() -> None:
    setting = Setting()
    tensor = torch.ones(3)
    setting.reduce(tensor)
    setting.backend.abort(ShutdownError("hvlike was shut down"))
    assert setting.backend.join(time.monotonic() + 60.0)
    assert setting.link.destroyed.is_set()
    assert not setting.link.aborted.is_set()
    setting.device.drain(setting.backend.stream)
    assert torch.equal(tensor, torch.full((3,), 3.0))


def test_what_does_not_finish_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "FINISH_SECONDS", 0.01)
    setting = Setting()
    setting.reduce(torch.ones(3))
    setting.device.has_passed = lambda event: False
    setting.backend.abort(ShutdownError("hvlike was shut down"))
    assert setting.backend.join(time.monotonic() + 60.0)
    assert setting.link.aborted.is_set()
    assert not setting.link.destroyed.is_set()


def test_a_device_that_fails_while_hvlike_ends_is_only_told(caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting()
    setting.reduce(torch.ones(3))

    def failing(event: object) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered\nSearch for it")

    setting.device.has_passed = failing
    setting.backend.abort(ShutdownError("hvlike was shut down"))
    assert setting.backend.join(time.monotonic() + 60.0)
    assert "a communicator of NCCL could not be ended: CUDA error: device-side assert triggered" in caplog.text


def test_the_time_of_a_call_that_connects_the_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    now = [100.0]
    monkeypatch.setattr(nccl.time, "monotonic", lambda: now[0])
    end = setting.nccl.groupEnd

    def slow() -> None:
        now[0] += 2 * LIMIT
        end()

    setting.nccl.groupEnd = slow
    setting.reduce(torch.ones(3))
    assert isinstance(setting.backend.watch(now[0]), StalledError)


def test_two_threads_take_turns_on_a_device() -> None:
    """Each with a communicator of its own. The stand-in refuses what NCCL forbids: both at a time."""
    first, second = Setting(), Setting()
    second.backend = NcclBackend(
        SoloBackend(), first.device, first.device.home(), (0, 1), Communicator(Nccl(first.nccl), first.link), LIMIT
    )
    end, errors = first.nccl.groupEnd, []

    def slow() -> None:
        time.sleep(0.005)
        end()

    first.nccl.groupEnd = slow

    def reduce(setting: Setting) -> None:
        try:
            for _ in range(10):
                setting.reduce(torch.ones(3))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reduce, args=(setting,)) for setting in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
