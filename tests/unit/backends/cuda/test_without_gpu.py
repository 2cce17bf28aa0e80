"""CUDA tensors without a GPU: which backend serves them, what NCCL is told to do, and errors, which all are raised."""

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.backends.fake_nccl import FakeNccl
from support.backends.late_device import LateDevice

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import SoloBackend
from hvlike.backends.cuda import nccl, runtime
from hvlike.backends.cuda.captures import BesideCaptures, find_exchange
from hvlike.backends.cuda.nccl import Communicator, Nccl, NcclBackend, Recipe, recipe_of
from hvlike.backends.cuda.opening import BackendChoice, DeviceFacts, choose_backend, why_not_nccl
from hvlike.backends.cuda.runtime import DeviceRuntime
from hvlike.errors import HorovodInternalError, LaunchError, ShutdownError, StalledError, UsageError
from hvlike.transport.memory.dtypes import TABLE


def test_streams_for_copies_are_made_once_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out 32 streams of a priority in turn: the 33rd is one that somebody else uses."""
    made: list[torch.device] = []
    monkeypatch.setattr(DeviceRuntime, "new_stream", lambda self, device: made.append(device) or object())
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    here = DeviceRuntime()
    streams = {here.common_stream(device, use) for use in ("down", "up", "deliver") for _ in range(100)}
    assert len(streams) == len(made) == 3
    assert here.common_stream(other, "down") not in streams


def test_a_question_is_asked_on_the_device_of_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current device of the loop's thread, GPU 0, it would make a context there."""
    current: list[Any] = ["GPU 0"]

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    asked: list[Any] = []
    event = SimpleNamespace(device="GPU 5", query=lambda: asked.append(current[-1]) or True)
    monkeypatch.setattr(torch.cuda, "device", device)
    assert DeviceRuntime().has_passed(event)
    assert asked == ["GPU 5"]


def test_parts_of_one_gpu_are_one_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [SimpleNamespace(uuid=f"MIG-{part}", pci_domain_id=0, pci_bus_id=7, pci_device_id=1) for part in range(2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: parts[device.index])
    identities = {DeviceRuntime().identity(torch.device("cuda", part)) for part in range(2)}
    assert identities == {"0000:07:01"}
    old = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: old)
    assert DeviceRuntime().identity(torch.device("cuda", 0)) == "GPU-1"


def test_a_call_inside_of_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = SimpleNamespace(is_capturing=lambda: True)
    monkeypatch.setitem(runtime.KINDS, "cpu", lambda: capturing)
    try:
        with pytest.raises(UsageError, match="while this thread captures a CUDA graph"):
            runtime.events_of("cpu", [torch.ones(1)])
        assert runtime.events_of("cpu", []) == []
    finally:
        runtime.forget("cpu")


GLOBAL, RELAXED = 0, 2


class Driver:
    """A library with the mode of one thread."""

    def __init__(self) -> None:
        self.mode = GLOBAL

    def exchange(self, mode: Any) -> int:
        held = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents
        held.value, self.mode = self.mode, held.value
        return 0


def test_the_mode_is_relaxed_inside_and_the_old_one_after() -> None:
    driver = Driver()
    with BesideCaptures(driver.exchange):
        assert driver.mode == RELAXED
        with BesideCaptures(driver.exchange):
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == GLOBAL


def test_an_error_leaves_the_old_mode() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="asked"), BesideCaptures(driver.exchange):
        raise ValueError("asked")
    assert driver.mode == GLOBAL


@pytest.mark.skipif(find_exchange() is not None, reason="CUDA is loaded here")
def test_without_cuda_there_is_nothing_to_do() -> None:
    with DeviceRuntime().beside_captures():
        pass


A, B = DeviceFacts("one", "gpu-a", 22703, ""), DeviceFacts("one", "gpu-b", 22703, "")
FAR = DeviceFacts("two", "gpu-a", 22703, "")
BARE = DeviceFacts("one", "gpu-c", 0, "CuPy is not installed: pip install hvlike[cuda12]")
OLD = DeviceFacts("one", "gpu-d", 21801, "")


@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        ([A, B], "auto", "nccl"),
        ([A, FAR], "auto", "nccl"),
        ([A, B], "staged", "staged"),
        ([A], "auto", "solo"),
        ([BARE], "staged", "solo"),
        ([A], "nccl", "nccl"),
        ([A, B], "nccl", "nccl"),
    ],
)
def test_the_backend(facts: list[DeviceFacts], wanted: str, expected: str) -> None:
    assert choose_backend(facts, range(len(facts)), wanted).backend == expected


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([A, B, A], ["ranks 4 and 6 on one share the GPU gpu-a", "3 ranks use 2", "torch.cuda.set_device"]),
        ([A, BARE], ["rank 5 has no NCCL", "pip install hvlike[cuda12]"]),
        ([A, OLD], ["different versions", "21801 on rank 5", "22703 on rank 4"]),
    ],
)
def test_the_reason_names_ranks_and_what_to_do(facts: list[DeviceFacts], words: list[str]) -> None:
    ranks = [4, 5, 6][: len(facts)]
    reason = why_not_nccl(facts, ranks)
    assert all(word in reason for word in words), reason
    assert choose_backend(facts, ranks, "auto") == BackendChoice("staged", reason)
    with pytest.raises(LaunchError) as caught:
        choose_backend(facts, ranks, "nccl")
    assert reason in str(caught.value)


def test_cupy_that_cannot_serve_is_unexpected() -> None:
    broken = DeviceFacts("one", "gpu-e", 0, "CuPy 13.0 is installed, but it finds no libnccl.so", "13.0")
    assert choose_backend([A, broken], range(2), "auto").is_unexpected
    assert not choose_backend([A, BARE], range(2), "auto").is_unexpected
    assert not choose_backend([broken, broken], range(2), "staged").is_unexpected


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

    def reduce(self, *tensors: torch.Tensor) -> None:
        """Begin a reduction that multiplies by three."""
        job = self.backend.allreduce(tensors, Arithmetic(torch.float32, ReduceOp.SUM, postscale=3.0))
        assert list(self.backend.run(job)) == []

    def break_device(self) -> None:
        """From now on it fails whatever it is asked."""

        def failing(event: object) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered\nSearch for it in the documentation")

        self.device.has_passed = failing


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


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_any_error_of_nccl_is_found_once_and_told_with_advice(kind: type[Exception]) -> None:
    setting = Setting()
    assert setting.backend.watch(time.monotonic()) is None
    setting.link.failure = kind("NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error")
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
    setting.break_device()
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
    setting.break_device()
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


def test_many_tensors_are_reduced_in_several_groups() -> None:
    setting = Setting()
    tensors = [torch.full((2,), float(number)) for number in range(5000)]
    setting.reduce(*tensors)
    assert [len(group) for group in setting.link.calls] == [2048, 2048, 904]
    setting.device.drain(setting.backend.stream)
    assert all(tensor.tolist() == [3.0 * number] * 2 for number, tensor in enumerate(tensors))


AVERAGE, SUM, _, MIN, MAX, PRODUCT = ReduceOp


@pytest.mark.parametrize(
    ("dtype", "op", "factors", "expected"),
    [
        (torch.float32, AVERAGE, {"divisor": 4}, Recipe("avg", 1, 1)),
        (torch.bfloat16, AVERAGE, {"divisor": 4, "prescale": 0.5, "postscale": 2}, Recipe("avg", 0.5, 2)),
        (torch.float16, SUM, {"postscale": 0.25}, Recipe("sum", 1, 0.25)),
        (torch.float64, AVERAGE, {"divisor": 2}, Recipe("sum", 1, 0.5)),
        (torch.float32, PRODUCT, {"prescale": 3}, Recipe("prod", 3, 1)),
        (torch.float32, MIN, {}, Recipe("min", 1, 1)),
        (torch.int32, SUM, {}, Recipe("sum", 1, 1)),
        (torch.int64, MAX, {}, Recipe("max", 1, 1)),
        (torch.int32, AVERAGE, {"divisor": 4}, None),
        (torch.int32, SUM, {"prescale": 2}, None),
        (torch.int16, SUM, {}, None),
        (torch.bool, SUM, {}, Recipe("max", 1, 1, torch.uint8)),
        (torch.bool, PRODUCT, {}, Recipe("min", 1, 1, torch.uint8)),
        (torch.complex64, AVERAGE, {"divisor": 4}, Recipe("avg", 1, 1, torch.float32)),
        (torch.complex128, SUM, {}, Recipe("sum", 1, 1, torch.float64)),
        (torch.complex64, PRODUCT, {}, None),
    ],
    ids=str,
)
def test_recipes(dtype: torch.dtype, op: ReduceOp, factors: dict[str, Any], expected: Recipe | None) -> None:
    assert recipe_of(Arithmetic(dtype, op, **factors), 4) == expected


def test_a_recipe_sees_the_memory_as_it_is() -> None:
    for dtype in TABLE:
        recipe = recipe_of(Arithmetic(dtype, SUM), 4)
        if recipe is not None:
            tensor = torch.zeros(6, dtype=dtype)
            seen = recipe.view(tensor)
            assert (seen.data_ptr(), seen.nbytes, seen.dim()) == (tensor.data_ptr(), tensor.nbytes, 1)


class Link:
    """A communicator that remembers how it was made."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def old_link(size: int, number: tuple[int, ...], rank: int) -> Link:
    """As CuPy 13 has it."""
    if not isinstance(number, tuple):
        raise TypeError("Argument 'commId' has incorrect type (expected tuple, got bytes)")
    return Link(size, number, rank)


NUMBER = bytes(range(128, 256))
CUPY_14 = SimpleNamespace(get_version=lambda: 23203, get_unique_id=lambda: NUMBER, NcclCommunicator=Link, NCCL_SUM=0)
CUPY_13 = SimpleNamespace(
    get_version=lambda: 21805,
    get_unique_id=lambda: tuple(each - 256 for each in NUMBER),
    NcclCommunicator=old_link,
    NCCL_SUM=0,
)


def test_numbers_of_communicators_travel_as_bytes() -> None:
    for module, expected in ((CUPY_14, NUMBER), (CUPY_13, CUPY_13.get_unique_id())):
        library = nccl.Nccl(module)
        number = library.new_id()
        assert number == NUMBER
        assert library.connect(3, number, 2).link.arguments == (3, expected, 2)


def test_what_a_version_has_not_is_left_out() -> None:
    library = nccl.Nccl(CUPY_14)
    assert (library.ops, library.dtypes) == ({"sum": 0}, {})


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    facts = nccl.describe()
    assert facts.version == 0
    assert "pip install hvlike[cuda1" in facts.missing
