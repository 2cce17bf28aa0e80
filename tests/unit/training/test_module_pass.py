"""A backward pass through a module: armed while it runs, its end called once; parts of it that are collected."""

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hvlike.training.ddp.end_of_backward import Collected, ModulePass, collecting, collection, next_number, next_turn


class Module:
    """What ModuleGradients does with its passes."""

    def __init__(self, number: int, ended: list[int]) -> None:
        self.number = number
        self.running: ModulePass | None = None
        self._ended = ended

    def arm(self, _: Tensor) -> None:
        """A hook of an output."""
        if self.running is None or not self.running.sees(None):
            self.running = ModulePass(None)
            self.running.call_at_end(self.number, self.end)

    def end(self) -> None:
        self._ended.append(self.number)


def backward(*modules: Module, fail: Callable[[Tensor], None] | None = None) -> Tensor:
    weight = torch.ones(2, requires_grad=True)
    if fail is not None:
        weight.register_hook(fail)
    output = weight * 2
    for module in modules:
        output.register_hook(module.arm)
    output.sum().backward()
    return weight


def test_a_pass_ends_once() -> None:
    ended: list[int] = []
    module = Module(1, ended)
    running = []
    backward(module, fail=lambda _: running.append(module.running is not None and module.running.armed))
    assert running == [True]
    assert ended == [1]
    assert module.running is not None
    assert not module.running.armed


def test_a_pass_that_fails_is_not_armed_any_more() -> None:
    ended: list[int] = []
    module = Module(1, ended)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("of the program")

    with pytest.raises(ArithmeticError):
        backward(module, fail=fail)
    assert module.running is not None
    assert not module.running.armed
    assert not module.running.sees(None)
    backward(module)
    assert ended == [1]


def test_modules_end_in_the_order_of_their_numbers_whichever_was_armed_first() -> None:
    first, second = next_number(), next_number()
    assert first < second
    assert next_turn() > next_turn()
    for numbers in ((first, second), (second, first)):
        ended: list[int] = []
        backward(*(Module(number, ended) for number in numbers))
        assert ended == [first, second]


def test_a_pass_in_parts_is_known_by_what_collects_them() -> None:
    collected = Collected({})
    running = ModulePass(collected)
    assert running.reduces
    assert running.sees(collected)
    assert not running.sees(Collected({}))
    assert not running.sees(None)


KEY = "hvlike.training.ddp.end_of_backward"


def test_a_pass_within_a_pass_has_its_own() -> None:
    outer, inner = Collected({}), Collected({})
    with collecting(outer):
        with collecting(inner):
            assert collection() is inner
        assert collection() is outer
    assert collection() is None


def test_references_are_counted() -> None:
    """Past bug: torch 2.5 drops a reference that it has not counted; the process died of that."""
    outer, inner = Collected({}), Collected({})
    before = sys.getrefcount(outer), sys.getrefcount(inner)
    for _ in range(10):
        with collecting(outer), collecting(inner):
            assert collection() is inner
        assert collection() is None
    assert (sys.getrefcount(outer), sys.getrefcount(inner)) == before


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch can only put things there")
def test_nothing_is_left_in_a_thread_for_its_end() -> None:
    """Past bug: torch drops a thread's objects after Python is done with it; at the end of the process that aborted."""
    left = []

    def run() -> None:
        with collecting(Collected({})):
            pass
        left.append(torch._C._is_key_in_tls(KEY))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert left == [False]
