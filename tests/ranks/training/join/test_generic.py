"""Join contexts of any Joinables: torch's contract, by its own tests' numbers; process sets; random schedules."""

from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.counters import AFTER, BEFORE, Counter, expected_total
from support.training.schedules import run_schedules
from torch import nn

from hvlike.errors import JoinError
from hvlike.join import Join, Joinable, JoinHook

EXHAUSTED = r"^Rank {rank} exhausted all inputs\.$"
DETECTED = r"^Detected at least one rank that exhausted inputs\. Throwing across all ranks\.$"


def test_totals_of_the_issue() -> None:
    assert [expected_total(rank, 4) for rank in range(4)] == [12, 15, 17, 18]


@pytest.mark.parametrize("joinables", [1, 3])
@pytest.mark.parametrize("keyword", [None, 2])
def test_uneven_inputs(hvd: ModuleType, joinables: int, keyword: int | None) -> None:
    rank, size = hvd.rank(), hvd.size()
    counters = [Counter() for _ in range(joinables)]
    kwargs: dict[str, Any] = {} if keyword is None else {"num_allreduces": keyword}
    total = 0
    with Join(counters, **kwargs):
        for _ in range(3 + rank):
            total += sum(counter() for counter in counters)
    assert total == expected_total(rank, size) * joinables * (keyword or 1)
    for counter in counters:
        assert counter.given == kwargs
        assert counter.tensor.item() == AFTER
        assert counter.is_last_joiner is (rank == size - 1)


def test_without_sums_it_still_ends_and_runs_the_post_hooks(hvd: ModuleType) -> None:
    counter = Counter(sums=0)
    with Join([counter]):
        for _ in range(3 + hvd.rank()):
            counter()
    assert counter.tensor.item() == AFTER


@pytest.mark.parametrize("joinables", [1, 3])
def test_disabled(hvd: ModuleType, joinables: int) -> None:
    counters = [Counter() for _ in range(joinables)]
    total = 0
    with Join(counters, enable=False):
        for _ in range(3):
            total += sum(counter() for counter in counters)
    assert total == 3 * hvd.size() * joinables
    assert [counter.tensor.item() for counter in counters] == [BEFORE] * joinables
    assert not counters[0]._join_config.enable


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("joinables", [1, 3])
def test_throw_on_early_termination(hvd: ModuleType, joinables: int) -> None:
    rank = hvd.rank()
    counters = [Counter() for _ in range(joinables)]
    iterations = 0

    def run() -> None:
        nonlocal iterations
        with Join(counters, throw_on_early_termination=True):
            for _ in range(3 + rank):
                for counter in counters:
                    counter()
                iterations += 1

    with pytest.raises(RuntimeError, match=EXHAUSTED.format(rank=rank) if rank == 0 else DETECTED):
        run()
    assert iterations == 3
    assert [counter.tensor.item() for counter in counters] == [BEFORE] * joinables
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_throw_with_even_inputs_throws_nothing(hvd: ModuleType) -> None:
    counter = Counter()
    with Join([counter], throw_on_early_termination=True):
        assert [counter() for _ in range(3)] == [hvd.size()] * 3
    assert counter.is_last_joiner


def test_zero_inputs_on_ranks(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    counter = Counter()
    with Join([counter]):
        totals = [counter() for _ in range(rank)]
    assert totals == [size - 1 - step for step in range(rank)]
    assert counter.tensor.item() == AFTER
    with Join([counter]):
        pass
    assert counter.is_last_joiner


def test_the_same_joinables_again(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    counters = [Counter(), Counter(sums=2)]
    for epoch in range(3):
        with Join(counters):
            for _ in range((rank + epoch) % size):
                assert all(1 <= counter() <= 2 * size for counter in counters)
        assert [counter.tensor.item() for counter in counters] == [AFTER] * 2


def test_only_the_first_joinable_has_a_heartbeat(hvd: ModuleType) -> None:
    first, second = Counter(), Counter()
    assert Join.notify_join_context(first) is None
    with Join([first, second]):
        handle = Join.notify_join_context(first)
        assert handle is not None
        assert Join.notify_join_context(second) is None
        assert handle.result().item() == hvd.size()
        assert first._join_config == (True, False, True)
        assert second._join_config == (True, False, False)
    assert first._join_config == (False, False, False)


class Talker(JoinHook):
    """Writes down what is called."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def main_hook(self) -> None:
        self.said.append(f"main {self.name}")

    def post_hook(self, last: bool) -> None:
        # torch gives it by position, so its name is up to the program.
        self.said.append(f"post {self.name}")


class Talking(Counter):
    """Has another hook."""

    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__(sums=0)
        self.name, self.said = name, said

    def join_hook(self, **kwargs: object) -> JoinHook:
        return Talker(self.name, self.said)


def test_hooks_run_in_the_order_of_the_joinables(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    said: list[str] = []
    talkers = [Talking(name, said) for name in ("b", "a", "c")]
    with Join(talkers):
        for _ in range(rank):
            for talker in talkers:
                talker()
        assert said == []
    assert said == ["main b", "main a", "main c"] * (size - 1 - rank) + ["post b", "post a", "post c"]


def test_wrong_arguments(hvd: ModuleType) -> None:
    with pytest.raises(ValueError, match="requires at least one joinable"):
        Join([])
    with pytest.raises(ValueError, match=r"expects instances of hvlike\.join\.Joinable, got object"):
        Join([object()])  # type: ignore[list-item]
    counter = Counter()
    with pytest.raises(ValueError, match="the same joinable twice"):
        Join([counter, counter])


class Forgetful(Joinable):
    """Does not call the constructor of its base."""

    def __init__(self) -> None:
        pass

    def join_hook(self, **kwargs: object) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> None:  # type: ignore[override]
        return None


def test_a_joinable_that_forgot_the_base_constructor(hvd: ModuleType) -> None:
    text = r"Check that the <class '.*Forgetful'> constructor calls the ``Joinable`` constructor"
    with pytest.raises(AssertionError, match=text):
        Join.notify_join_context(Forgetful())


def test_nested_contexts_are_refused(hvd: ModuleType) -> None:
    counter, other = Counter(), Counter()
    with Join([counter]):
        with pytest.raises(ValueError, match="Counter is in a Join context already"), Join([counter]):
            pass
        with pytest.raises(ValueError, match="in a Join context of the same process set already"), Join([other]):
            pass
        with pytest.raises(ValueError, match="inside a Join context"):
            hvd.join()
        assert counter() == hvd.size()
    with Join([other, counter]):
        other()


def test_unnamed_operations_match_again_afterwards(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    counter = Counter()
    with Join([counter]):
        for _ in range(2 * rank):
            counter()
    for _ in range(3):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_who_misses_a_thousand_iterations_is_warned_once(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, size = hvd.rank(), hvd.size()
    monkeypatch.setattr("hvlike.training.join_round.WARN_THRESHOLD", 3)
    counter = Counter()

    def run() -> None:
        with Join([counter]):
            for _ in range(6 if rank == size - 1 else 1):
                counter()

    if rank == size - 1:
        run()
    else:
        text = rf"Detected uneven input skew of greater than 3\. This means that rank {rank} has at least 3 fewer"
        with pytest.warns(UserWarning, match=text) as caught:
            run()
        assert len(caught) == 1


def test_random_schedules(hvd: ModuleType) -> None:
    """A few of those that `mpirun -n 4 python schedules.py SEED COUNT` runs by the thousand."""
    ends = run_schedules(hvd, seed=4, count=14)
    assert sum(ends.values()) == 14
    assert hvd.size() == 1 or set(ends) == {"joined", "thrown", "failed"}


@pytest.mark.mpi(min_size=3)
def test_a_set_joins_and_the_others_know_nothing_of_it(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    members = list(range(1, size))
    process_set = hvd.add_process_set(members)
    counter = Counter(process_set=process_set)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=process_set)
    assert optimizer.join_process_group is process_set
    for _ in range(2):
        with Join([counter, optimizer]):
            # Rank 0 is in none of it: its own steps are its own.
            for step in range(rank):
                if rank:
                    assert counter() == size - 1 - step
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    if rank:
        assert counter.tensor.item() == AFTER
        # Average over the set: in step i all but i of its ranks have inputs.
        steps = 2 * sum((size - 1 - step) / (size - 1) for step in range(size - 1))
        torch.testing.assert_close(model.weight, torch.full((1, 2), 1 - steps), rtol=1e-5, atol=1e-5)
    else:
        assert counter.tensor.item() == BEFORE
    assert hvd.remove_process_set(process_set)


@pytest.mark.mpi(min_size=3)
def test_a_failure_in_a_set_stays_there(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    process_set = hvd.add_process_set([0, size - 1])
    counter = Counter(process_set=process_set)

    def body() -> None:
        with Join([counter]):
            if rank == 0:
                raise KeyError("here")
            counter()
            counter()

    if rank in (0, size - 1):
        with pytest.raises(JoinError if rank else KeyError, match="here"):
            body()
    else:
        with Join([counter]):
            pass
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.remove_process_set(process_set)


@pytest.mark.mpi(min_size=3)
def test_joinables_of_two_sets_are_refused(hvd: ModuleType) -> None:
    process_set = hvd.add_process_set([0, 1])
    counters = [Counter(), Counter(process_set=process_set)]
    with pytest.raises(ValueError, match="Using join context manager with multiple process groups"):
        Join(counters)
    with Join(counters[:1]):
        counters[0]()
        if hvd.rank() < 2:
            # Another set is another context.
            with Join(counters[1:]):
                assert counters[1]() == 2
    assert hvd.remove_process_set(process_set)
