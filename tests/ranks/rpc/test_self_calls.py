"""Calls of a worker to itself: they copy, like any other, and work from everywhere."""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import hvlike.rpc

KEPT = {"tensor": torch.zeros(3), "list": [1]}


def change(tensor: torch.Tensor, numbers: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Change the arguments in place and return them."""
    tensor.fill_(1)
    numbers.append(2)
    return tensor, numbers


def kept(name: str) -> Any:
    return KEPT[name]


def is_kept(value: Any, name: str) -> bool:
    return value is KEPT[name]


def call_oneself(depth: int) -> int:
    """How often this worker has called itself from inside the calls."""
    if depth == 0:
        return 0
    me = hvlike.rpc.get_worker_info()
    result: int = hvlike.rpc.rpc_sync(me, call_oneself, (depth - 1,)) + 1
    return result


def thread() -> int:
    return threading.get_ident()


@pytest.fixture
def calls(hvd: ModuleType, rpc: ModuleType) -> dict[str, Callable[..., Any]]:
    """The forms of call: each runs a function on this worker."""
    me = hvd.rank()
    return {
        "sync": lambda func, *args: rpc.rpc_sync(me, func, args),
        "async": lambda func, *args: rpc.rpc_async(me, func, args).wait(),
        "remote": lambda func, *args: rpc.remote(me, func, args).to_here(),
    }


def test_arguments_are_copied(calls: dict[str, Callable[..., Any]]) -> None:
    for call in calls.values():
        for length in (3, 100_000):
            tensor, numbers = torch.zeros(length), [1]
            changed, longer = call(change, tensor, numbers)
            assert torch.equal(changed, torch.ones(length))
            assert longer == [1, 2]
            assert torch.equal(tensor, torch.zeros(length))
            assert numbers == [1]
            assert not call(is_kept, KEPT["tensor"], "tensor")
            assert not call(is_kept, KEPT["list"], "list")


def test_results_are_copied(calls: dict[str, Callable[..., Any]]) -> None:
    for form in ("sync", "async"):
        calls[form](kept, "tensor").fill_(5)
        calls[form](kept, "list").append(3)
        assert torch.equal(KEPT["tensor"], torch.zeros(3))  # type: ignore[arg-type]
        assert KEPT["list"] == [1]


def test_a_result_kept_on_its_owner_is_the_object_itself(calls: dict[str, Callable[..., Any]]) -> None:
    assert calls["remote"](kept, "list") is KEPT["list"]


def test_calls_from_inside_calls(calls: dict[str, Callable[..., Any]]) -> None:
    for call in calls.values():
        assert call(call_oneself, 8) == 8


def test_functions_run_in_another_thread(calls: dict[str, Callable[..., Any]]) -> None:
    for call in calls.values():
        assert call(thread) != threading.get_ident()


def test_every_name_of_oneself(rpc: ModuleType) -> None:
    me = rpc.get_worker_info()
    for destination in (me, me.name, me.id):
        assert rpc.rpc_sync(destination, max, (1, 2)) == 2
        assert rpc.rpc_async(destination, max, (1, 2)).wait() == 2
        assert rpc.remote(destination, max, (1, 2)).to_here() == 2
