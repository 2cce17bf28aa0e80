"""Exceptions of functions that run for others: what their callers get, in every form of a call."""

import io
import sys
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door, passes
from support.rpc.forms import FORMS, asynchronous, synchronous

from hvlike.errors import WorkerLostError
from hvlike.rpc import WorkerInfo


class Custom(Exception):
    """Can be made of one text."""


class Narrow(ValueError):
    """A subclass of a class that callers see."""


class TwoTexts(Exception):
    """Cannot be made of one text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


ERRORS = {
    "ValueError": ValueError("the value\nis wrong"),
    "TypeError": TypeError("the type"),
    "Narrow": Narrow("narrow"),
    "AttributeError": AttributeError("no such thing"),
    "KeyError": KeyError("key"),
    "StopIteration": StopIteration("end"),
    "Custom": Custom("ключ é"),
    "TwoTexts": TwoTexts("first", "second"),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
}


def fail(name: str) -> NoReturn:
    error = ERRORS[name]
    raise type(error)(*error.args)


def fail_at(rank: int, via: list[int]) -> Any:
    """Fails on `rank`, called through the ranks before it."""
    import hvlike.rpc

    return hvlike.rpc.rpc_sync(via[0], fail_at, (rank, via[1:])) if via else fail("Custom")


_stderr: list[Any] = []


def replace_stderr() -> None:
    _stderr.append(sys.stderr)
    sys.stderr = io.StringIO()


def restored_stderr() -> str:
    """What was written since it was replaced."""
    replaced = sys.stderr
    assert isinstance(replaced, io.StringIO)
    sys.stderr = _stderr.pop()
    return replaced.getvalue()


@pytest.fixture
def where(rpc: ModuleType, peer: int) -> str:
    """How messages from there begin."""
    return f"On {rpc.rpc_sync(peer, rpc.get_worker_info)}:\n"


@pytest.mark.parametrize(
    ("name", "kept"), [("ValueError", ValueError), ("TypeError", TypeError), ("Narrow", ValueError)]
)
def test_value_and_type_errors_keep_their_class(
    rpc: ModuleType, peer: int, where: str, name: str, kept: type[Exception]
) -> None:
    for form in (synchronous, asynchronous):
        with pytest.raises(kept) as caught:
            form(peer, fail, (name,))
        assert type(caught.value) is kept
        text = str(caught.value)
        assert text.startswith(f"{name}: {where}")
        assert "Traceback (most recent call last)" in text
        assert "in fail" in text
        assert text == text.encode("utf-8").decode("unicode_escape")


@pytest.mark.parametrize("name", ["AttributeError", "StopIteration", "Custom", "SystemExit", "KeyboardInterrupt"])
def test_other_classes_become_runtime_errors_that_name_them(rpc: ModuleType, peer: int, where: str, name: str) -> None:
    for form in (synchronous, asynchronous):
        with pytest.raises(RuntimeError) as caught:
            form(peer, fail, (name,))
        assert f"{name}: {where}" in str(caught.value)
        # Other scripts are not garbled.
        assert name != "Custom" or "Custom: ключ é" in str(caught.value)
    assert rpc.rpc_sync(peer, min, (1, 2)) == 1, "the worker must live on"


@pytest.mark.parametrize("name", ["ValueError", "Narrow", "AttributeError", "StopIteration", "Custom"])
def test_to_here_raises_the_original_class(rpc: ModuleType, peer: int, where: str, name: str) -> None:
    reference = rpc.remote(peer, fail, (name,))
    for _ in range(2):
        with pytest.raises(type(ERRORS[name])) as caught:
            reference.to_here()
        assert type(caught.value) is type(ERRORS[name])
        if not reference.is_owner():
            assert where in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_a_class_that_cannot_be_rebuilt(rpc: ModuleType, peer: int, where: str) -> None:
    for form in FORMS.values():
        with pytest.raises(RuntimeError) as caught:
            form(peer, fail, ("TwoTexts",))
        assert f"Original exception on remote side was {where}TwoTexts(" in str(caught.value)


class OfLostWorker:
    """Like a reference whose owner was lost, it cannot be sent any more."""

    def __reduce__(self) -> NoReturn:
        raise WorkerLostError("worker9 (rank 9) is lost", [9])


@pytest.mark.mpi(min_size=2)
def test_a_result_that_a_lost_worker_keeps_from_being_sent_names_that_worker(rpc: ModuleType, peer: int) -> None:
    for form in FORMS.values():
        with pytest.raises(WorkerLostError, match=r"cannot be sent: WorkerLostError: worker9 \(rank 9\) is lost"):
            form(peer, OfLostWorker)


def test_errors_of_torch_operators(rpc: ModuleType, peer: int) -> None:
    for form in FORMS.values():
        with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match the size of tensor b \(3\)"):
            form(peer, torch.add, (torch.ones(2), torch.ones(3)))


def test_traceback_is_printed_to_stderr_of_the_worker_that_ran_it(
    hvd: ModuleType, rpc: ModuleType, peer: int, where: str
) -> None:
    for _ in range(2):
        # pytest has put its own stderr into place everywhere.
        hvd.barrier()
        rpc.rpc_sync(peer, replace_stderr)
        with pytest.raises(ValueError):
            rpc.rpc_sync(peer, fail, ("ValueError",))
        printed = rpc.rpc_sync(peer, restored_stderr)
        hvd.barrier()
        assert f"{where}ValueError(" in printed
        assert "in fail" in printed
        assert "ValueError: the value\nis wrong" in printed


def test_error_of_a_nested_call_tells_the_whole_way(hvd: ModuleType, rpc: ModuleType, peer: int) -> None:
    last = (peer + 1) % hvd.size()
    with pytest.raises(RuntimeError) as caught:
        rpc.rpc_sync(peer, fail_at, (last, [last]))
    text = str(caught.value)
    assert text.startswith(f"RuntimeError: On {worker_of(rpc, peer)}:\n")
    assert f"Custom: On {worker_of(rpc, last)}:\n" in text


def worker_of(rpc: ModuleType, rank: int) -> WorkerInfo:
    info = rpc.rpc_sync(rank, rpc.get_worker_info)
    assert isinstance(info, WorkerInfo)
    return info


@pytest.mark.parametrize("name", ["ValueError", "KeyError"])
def test_a_future_raises_the_same_error_in_every_wait(rpc: ModuleType, peer: int, name: str) -> None:
    future = rpc.rpc_async(peer, fail, (name,))
    seen = []
    for _ in range(3):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            future.wait()
        seen.append((type(caught.value), str(caught.value)))
    assert len(set(seen)) == 1
    assert future.done()
    with pytest.raises(seen[0][0]):
        future.value()


def test_wait_all_leaves_early_and_the_open_call_goes_on(rpc: ModuleType, peer: int, name: str) -> None:
    slow = rpc.rpc_async(peer, pass_door, (name, 5))
    waits = torch.futures.wait_all, lambda futures: torch.futures.collect_all(futures).wait()
    for wait in waits:
        for error, kept in (("KeyError", RuntimeError), ("ValueError", ValueError)):
            with pytest.raises(kept, match=f"{error}: On WorkerInfo"):
                wait([slow, rpc.rpc_async(peer, fail, (error,))])
            assert not slow.done()
    rpc.rpc_sync(peer, open_door, (name,))
    assert slow.wait() == 5


def test_calls_left_open_after_an_error_do_not_disturb_the_shutdown(
    hvd: ModuleType, rpc: ModuleType, peer: int
) -> None:
    name = f"left open {hvd.rank()}"
    left = [rpc.rpc_async(peer, await_promise, (name,)), rpc.rpc_async(peer, pass_door, (name,))]
    with pytest.raises(RuntimeError):
        torch.futures.wait_all([*left, rpc.rpc_async(peer, fail, ("KeyError",))])
    rpc.rpc_async(peer, keep_promise, (name,))
    rpc.rpc_async(peer, open_door, (name,))
    rpc.shutdown()
    assert passes(f"left open {(hvd.rank() - 1) % hvd.size()}") == 1
