"""Optimizers and wrapped models in several threads: matched by the names they were given, or an error that says so.

A signal handler that raises in the middle of a step makes its rank leave it, and all ranks learn of it.
"""

import _thread
import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, whole_batch
from support.training.ways import Wrapped
from torch import nn
from torch.optim import SGD

from hvlike.errors import HorovodInternalError, UsageError
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.mpi(min_size=2)


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException | None]:
    """Run it in this many threads at once; what each has raised."""
    errors: list[BaseException | None] = [None] * count

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class Turns:
    """Lets threads go one after the other, in another order on each rank."""

    def __init__(self, hvd: ModuleType, count: int) -> None:
        self._order = sorted(range(count), reverse=hvd.rank() % 2 == 1)
        self._made = threading.Barrier(count)
        self._ready = [threading.Event() for _ in range(count)]

    def all_are_made(self) -> None:
        self._made.wait(30)

    def begins(self, number: int) -> None:
        place = self._order.index(number)
        if place:
            # Half a second later at the latest: the one before may wait for the other ranks.
            self._ready[self._order[place - 1]].wait(0.5)
        self._ready[number].set()


def model() -> nn.Linear:
    linear = nn.Linear(2, 1)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def step(module: nn.Module, optimizer: Any, factor: float) -> None:
    optimizer.zero_grad()
    (module(torch.ones(1, 2)) * factor).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_named_optimizers_are_matched_by_their_names(hvd: ModuleType, op: str) -> None:
    turns, models = Turns(hvd, 3), [model() for _ in range(3)]

    def work(number: int) -> None:
        names = [(f"model{number}.{name}", each) for name, each in models[number].named_parameters()]
        plain = SGD(models[number].parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, names, op=getattr(hvd, op))
        turns.begins(number)
        for _ in range(3):
            step(models[number], optimizer, 10.0**number)

    assert in_threads(3, work) == [None] * 3
    for number, trained in enumerate(models):
        torch.testing.assert_close(trained.weight, torch.full((1, 2), -3 * 10.0**number))


def test_a_named_one_beside_one_in_the_main_thread(hvd: ModuleType) -> None:
    models = [model(), model()]
    first = hvd.DistributedOptimizer(SGD(models[0].parameters(), lr=1.0))
    names = [(f"beside.{name}", each) for name, each in models[1].named_parameters()]

    def work(_: int) -> None:
        second = hvd.DistributedOptimizer(SGD(models[1].parameters(), lr=1.0), names)
        for _ in range(3):
            step(models[1], second, 100.0)

    thread = threading.Thread(target=in_threads, args=(1, work))
    thread.start()
    for _ in range(3):
        step(models[0], first, 1.0)
    thread.join()
    torch.testing.assert_close(models[0].weight, torch.full((1, 2), -3.0))
    torch.testing.assert_close(models[1].weight, torch.full((1, 2), -300.0))


@pytest.mark.parametrize("names", [False, True], ids=["without names", "the same names"])
def test_what_cannot_be_told_apart_is_refused(hvd: ModuleType, names: bool) -> None:
    turns, models = Turns(hvd, 2), [model(), model()]

    def work(number: int) -> None:
        named = list(models[number].named_parameters()) if names else None
        optimizer = hvd.DistributedOptimizer(SGD(models[number].parameters(), lr=1.0), named)
        turns.all_are_made()
        turns.begins(number)
        step(models[number], optimizer, 1.0)

    for error in in_threads(2, work):
        assert isinstance(error, UsageError)
        assert "used in several threads" in str(error)
        assert "named_parameters" in str(error)
    assert all(not each.weight.any() for each in models)


def test_one_after_the_other_needs_no_names(hvd: ModuleType) -> None:
    models = [model(), model()]
    for number in range(2):

        def work(_: int, number: int = number) -> None:
            step(models[number], hvd.DistributedOptimizer(SGD(models[number].parameters(), lr=1.0)), 10.0**number)

        assert in_threads(1, work) == [None]
    assert [float(each.weight.detach()[0, 0]) for each in models] == [-1.0, -10.0]


def test_two_of_one_thread(hvd: ModuleType) -> None:
    """Made in the main thread, both used in another one."""
    models = [model(), model()]
    optimizers = [hvd.DistributedOptimizer(SGD(each.parameters(), lr=1.0)) for each in models]

    def work(_: int) -> None:
        for module, optimizer in zip(models, optimizers, strict=True):
            step(module, optimizer, 1.0)

    assert in_threads(1, work) == [None]
    assert all(float(each.weight.detach()[0, 0]) == -1.0 for each in models)


def test_wrapped_models_are_made_in_one_thread_and_used_in_several(hvd: ModuleType) -> None:
    turns, models = Turns(hvd, 2), [model(), model()]
    wrapped = [DistributedDataParallel(each) for each in models]
    zeros = [ZeroRedundancyOptimizer(each.parameters(), SGD, lr=1.0) for each in models]

    def work(number: int) -> None:
        turns.begins(number)
        for _ in range(3):
            step(wrapped[number], zeros[number], 10.0**number)

    assert in_threads(2, work) == [None] * 2
    for number, trained in enumerate(models):
        torch.testing.assert_close(trained.weight, torch.full((1, 2), -3 * 10.0**number))


def ddp(module: nn.Module) -> object:
    return DistributedDataParallel(module)


def zero(module: nn.Module) -> object:
    return ZeroRedundancyOptimizer(module.parameters(), SGD, lr=1.0)


@pytest.mark.parametrize("make", [ddp, zero])
def test_made_in_several_threads(hvd: ModuleType, make: Callable[[nn.Module], object]) -> None:
    """The second one is refused on every rank, and so is a step of the first."""
    kept: list[Any] = []
    first = [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        if number:
            first[0].wait(60)
        try:
            kept.append(make(model()))
        finally:
            first[number].set()
        if not number:
            first[1].wait(60)
        module = kept[0] if isinstance(kept[0], nn.Module) else model()
        module(torch.ones(1, 2)).sum().backward()
        kept[0].step() if isinstance(kept[0], ZeroRedundancyOptimizer) else None

    for error in in_threads(2, work):
        assert isinstance(error, UsageError)
        assert "Make them in one thread" in str(error)


# -- backward in a thread of autograd, of which it has one for each GPU --------------------------------


def backward_elsewhere(loss: torch.Tensor) -> None:
    """Run backward in a thread that Python has not started. Raises: what it raises."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    ended = threading.Event()
    _thread.start_new_thread(run, ())
    assert ended.wait(60)
    if errors:
        raise errors[0] or AssertionError


def test_models_are_told_apart_by_the_thread_of_their_forward(hvd: ModuleType) -> None:
    """A copy takes its name as it is first reduced, in backward."""
    models = [DistributedDataParallel(model()) for _ in range(2)]
    copied = copy.deepcopy(models[1])
    for each in (models[0], copied):
        backward_elsewhere(each(torch.full((1, 2), 1.0 + hvd.rank())).sum())
        average = sum(1.0 + rank for rank in range(hvd.size())) / hvd.size()
        torch.testing.assert_close(each.module.weight.grad, torch.full((1, 2), average))


def test_copies_of_several_threads_cannot_be_told_apart_in_backward(hvd: ModuleType) -> None:
    models = [copy.deepcopy(DistributedDataParallel(model())) for _ in range(2)]
    first, second = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number:
            assert first.wait(60)
        try:
            backward_elsewhere(models[number](torch.ones(1, 2)).sum())
        finally:
            (second if number else first).set()
        # The thread lives on, and may train beside the other one.
        assert second.wait(60)

    found = in_threads(2, work)
    assert found[0] is None
    assert isinstance(found[1], UsageError)
    assert "used in several threads" in str(found[1])


# -- signals ------------------------------------------------------------------------------------------


class Late(Exception):
    pass


def refuse(number: int, frame: object) -> None:
    raise Late


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, refuse)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("way", ["optimizer", "adasum", "zero"])
def test_a_signal_handler_that_raises_in_a_step(hvd: ModuleType, handler: None, tmp_path: Path, way: str) -> None:
    left = Path(hvd.broadcast_object(str(tmp_path), 0)) / "left"
    model = make_model()
    optimizer = Wrapped(way, model).optimizer

    def step(*, interrupted: bool = False) -> bool:
        """Whether it has ended well."""
        try:
            optimizer.zero_grad()
            loss_of(model, whole_batch()).backward()
            if interrupted:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            optimizer.step()
        except (Late, HorovodInternalError):
            return False
        return True

    for _ in range(3):
        assert step()
    if hvd.rank() == 1:
        # The others are not there yet: it waits for them.
        assert not step(interrupted=True)
        left.touch()
        assert not step()
    else:
        while not left.exists():
            time.sleep(0.01)
        assert not (step() and step())
    hvd.shutdown()
    hvd.init()
    if way == "zero":
        optimizer = Wrapped(way, model).optimizer
    else:
        optimizer.abandon()
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        assert step()
    assert same_on_all_ranks(model.parameters())
