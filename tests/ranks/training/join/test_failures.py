"""An exception in a Join context on one rank: the others get an error that names it; the job goes on."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.counters import AFTER, Counter, CounterHook
from support.training.problem import same_on_all_ranks
from torch import nn

from hvlike.backends.base import Backend
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.errors import JoinError, MismatchError
from hvlike.join import Join, Joinable, JoinHook
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.training.joinable import BuiltInJoinable
from hvlike.transport.loop.coroutine import Coroutine

pytestmark = pytest.mark.mpi(min_size=2)

NAMED = r"Rank 1 has left the Join context of .* with KeyError: 'here'\. All ranks have left it"


class Training:
    """A model, its optimizer and a counter."""

    def __init__(self, hvd: ModuleType) -> None:
        torch.manual_seed(0)
        self.hvd = hvd
        self.model = nn.Linear(3, 2)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1), self.model.named_parameters()
        )
        self.counter = Counter()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def average(self) -> None:
        """An operation of the user's own."""
        self.hvd.allreduce(torch.ones(1), name="metric")

    def unnamed(self) -> None:
        self.hvd.allreduce(torch.ones(1))

    def count(self) -> None:
        self.counter()

    def nothing(self) -> None:
        """Leave the body."""

    def go_on_alike(self, joinables: list[Any]) -> None:
        """After a failure everything works as before."""
        self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        assert self.hvd.allreduce(torch.ones(1), op=self.hvd.Sum).item() == self.hvd.size()
        with Join(joinables):
            for _ in range(self.hvd.rank() + 1):
                if self.counter in joinables:
                    self.counter()
                if self.optimizer in joinables:
                    self.step()
        assert same_on_all_ranks(self.model.parameters())
        assert self.counter.tensor.item() == AFTER or self.counter not in joinables
        self.step()
        assert same_on_all_ranks(self.model.parameters())


def fail_on_rank_1(hvd: ModuleType, joinables: list[Any], before: int, act: Callable[[], None], **kwargs: Any) -> None:
    """All ranks act some times; then rank 1 fails, and the others go on until they are told."""
    failure = KeyError("here")

    def body() -> None:
        with Join(joinables, **kwargs):
            for _ in range(before):
                act()
            if hvd.rank() == 1:
                raise failure
            for _ in range(3):
                act()

    if hvd.rank() == 1:
        with pytest.raises(KeyError) as caught:
            body()
        assert caught.value is failure
    else:
        with pytest.raises(JoinError, match=NAMED):
            body()


@pytest.mark.parametrize("act", ["step", "average", "unnamed", "nothing"])
@pytest.mark.parametrize("before", [0, 2])
def test_others_wait_beside_an_optimizer(hvd: ModuleType, act: str, before: int) -> None:
    training = Training(hvd)
    fail_on_rank_1(hvd, [training.optimizer], before, getattr(training, act))
    training.go_on_alike([training.optimizer])


@pytest.mark.parametrize("act", ["count", "step", "average", "nothing"])
def test_others_wait_beside_a_joinable_of_ones_own(hvd: ModuleType, act: str) -> None:
    training = Training(hvd)
    joinables = [training.counter, training.optimizer]
    fail_on_rank_1(hvd, joinables, 2, getattr(training, act))
    training.go_on_alike(joinables)


def test_others_wait_where_all_shall_end_with_the_first(hvd: ModuleType) -> None:
    training = Training(hvd)
    joinables = [training.counter, training.optimizer]
    fail_on_rank_1(hvd, joinables, 2, training.count, throw_on_early_termination=True)
    training.go_on_alike(joinables)


def test_one_rank_has_left_and_another_waits_in_a_step(hvd: ModuleType) -> None:
    training = Training(hvd)
    size = hvd.size()

    def body() -> None:
        with Join([training.optimizer]):
            # The last rank has no input at all, and no plan either.
            for step in range(0 if hvd.rank() == size - 1 > 1 else 4):
                if step == 2 and hvd.rank() == 1:
                    raise KeyError("here")
                training.step()

    with pytest.raises(KeyError if hvd.rank() == 1 else JoinError, match="here"):
        body()
    training.go_on_alike([training.optimizer])


def test_between_backward_and_step(hvd: ModuleType) -> None:
    training = Training(hvd)
    training.step()

    def body() -> None:
        with Join([training.optimizer]):
            training.optimizer.zero_grad()
            training.model(torch.ones(1, 3)).sum().backward()
            if hvd.rank() == 1:
                raise KeyError("here")
            training.optimizer.step()

    with pytest.raises(KeyError if hvd.rank() == 1 else JoinError, match="here"):
        body()
    training.go_on_alike([training.optimizer])


def test_an_optimizer_that_was_left_between_backward_and_step_disturbs_no_other_context(hvd: ModuleType) -> None:
    left, other = Training(hvd), Training(hvd)

    def body() -> None:
        with Join([left.optimizer]):
            left.model(torch.ones(1, 3)).sum().backward()
            if hvd.rank() == 1:
                raise KeyError("here")
            left.optimizer.step()

    with pytest.raises(KeyError if hvd.rank() == 1 else JoinError, match="here"):
        body()
    other.go_on_alike([other.optimizer])
    left.go_on_alike([left.optimizer])


def test_who_goes_on_all_the_same_is_told_again_and_at_the_end(hvd: ModuleType) -> None:
    training = Training(hvd)
    told = 0

    def body() -> None:
        nonlocal told
        with Join([training.optimizer]):
            if hvd.rank() == 1:
                raise KeyError("here")
            for act in (training.step, training.step, training.average, training.step):
                with pytest.raises(JoinError, match=NAMED):
                    act()
                told += 1

    with pytest.raises(KeyError if hvd.rank() == 1 else JoinError, match="here"):
        body()
    assert told == (0 if hvd.rank() == 1 else 4)
    training.go_on_alike([training.optimizer])


def test_all_ranks_fail_each_for_its_own_reason(hvd: ModuleType) -> None:
    training = Training(hvd)

    def body() -> None:
        with Join([training.optimizer]):
            training.step()
            raise KeyError(f"rank {hvd.rank()}")

    for _ in range(3):
        # The steps that all have taken part in are completed, so every rank comes to its own exception.
        with pytest.raises(KeyError, match=f"rank {hvd.rank()}"):
            body()
        assert same_on_all_ranks(training.model.parameters())
    training.go_on_alike([training.optimizer])


def test_an_interrupt_is_like_any_exception(hvd: ModuleType) -> None:
    training = Training(hvd)

    def body() -> None:
        with Join([training.optimizer]):
            training.step()
            if hvd.rank() == 1:
                raise KeyboardInterrupt
            training.step()

    with pytest.raises(KeyboardInterrupt if hvd.rank() == 1 else JoinError):
        body()
    training.go_on_alike([training.optimizer])


class Failing(CounterHook):
    """Fails in one of its parts."""

    part = ""

    def main_hook(self) -> None:
        if self.part == "main":
            raise KeyError("here")
        super().main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        if self.part == "post":
            raise KeyError("here")
        super().post_hook(is_last_joiner)


class FailingCounter(Counter):
    """Its hook fails on rank 1."""

    part = ""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = Failing(self, self.sums)
        hook.part = self.part
        return hook


@pytest.mark.parametrize("part", ["main", "post"])
def test_a_hook_that_fails(hvd: ModuleType, part: str) -> None:
    counter = FailingCounter()
    counter.part = part if hvd.rank() == 1 else ""

    def body() -> None:
        with Join([counter]):
            # Rank 1 has the fewest inputs.
            for _ in range(2 if hvd.rank() == 1 else 4):
                counter()

    with pytest.raises(KeyError if hvd.rank() == 1 else JoinError, match="here"):
        body()
    counter.part = ""
    with Join([counter]):
        for _ in range(hvd.rank()):
            counter()
    assert counter.tensor.item() == AFTER


class Planner(BuiltInJoinable):
    """What it does is planned; a rank that has left stands in for it once, and not a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.stood_in = 0
        self.process_set = None
        self.queue = PlannedQueue("Planner")
        self.queue.stand_in = self.stand_in
        self.queue.agree()

    def __call__(self) -> int:
        return self.queue.run(self.count(active=True))

    def count(self, *, active: bool) -> CountingJob:
        def run(backend: Backend) -> Coroutine[int]:
            return (yield from backend.count_active(active))

        return run

    def stand_in(self) -> CountingJob:
        self.stood_in += 1
        if self.stood_in == 2:
            raise KeyError("here")
        return self.count(active=False)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.mark.parametrize("counted", [False, True])
def test_what_stands_in_fails_in_the_loop(hvd: ModuleType, counted: bool) -> None:
    """Others wait in a planned step for a rank that can no longer stand in."""
    planner, counter = Planner(), Counter()
    joinables: list[Joinable] = [counter, planner] if counted else [planner]

    def body() -> None:
        with Join(joinables):
            for _ in range(0 if hvd.rank() == 1 else 3):
                if counted:
                    counter()
                planner()

    with pytest.raises(KeyError if hvd.rank() == 1 else JoinError, match="here"):
        body()
    planner.stood_in = 2
    with Join(joinables):
        for _ in range(hvd.rank()):
            if counted:
                counter()
            planner()


def test_different_joinables_are_found_on_every_rank(hvd: ModuleType) -> None:
    training, others = Training(hvd), Training(hvd)
    # From here on the ranks know both.
    training.step()
    others.step()

    def body() -> None:
        with Join([training.optimizer] if hvd.rank() == 0 else [training.optimizer, others.optimizer]):
            training.step()

    with pytest.raises(MismatchError, match="Mismatched join: rank 0 left its Join context of DistributedOptimizer, "):
        body()
    training.go_on_alike([training.optimizer])


def test_a_mismatch_in_the_body_is_raised_as_it_is(hvd: ModuleType) -> None:
    training = Training(hvd)

    def body() -> None:
        with Join([training.optimizer]):
            training.step()
            hvd.allreduce(torch.ones(1 + min(1, hvd.rank())), name="different")

    # A rank may hear first that another one has left by this very error.
    with pytest.raises((MismatchError, JoinError), match="shapes"):
        body()
    training.go_on_alike([training.optimizer])


def test_what_cannot_do_without_a_rank_that_has_left(hvd: ModuleType) -> None:
    training = Training(hvd)

    def body() -> None:
        with Join([training.optimizer]):
            for _ in range(1 + hvd.rank()):
                training.step()
                hvd.allgather(torch.ones(1), name="rows")

    text = "rank 0 left its Join context of DistributedOptimizer and takes no part|by HorovodInternalError"
    with pytest.raises(hvd.HorovodInternalError, match=text):
        body()
    training.go_on_alike([training.optimizer])
