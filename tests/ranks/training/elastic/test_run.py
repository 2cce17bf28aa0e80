"""elastic.run: after an error, on some ranks or on all, training ends where it would have ended without it."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import Tensor

import hvlike
from hvlike.elastic import HostsUpdatedInterrupt, ObjectState, State, TorchState, run
from hvlike.errors import HorovodInternalError, UsageError

STEPS = 5


@pytest.fixture
def job(hvd: ModuleType) -> Iterator[ModuleType]:
    """hvlike, running on all ranks again afterwards."""
    yield hvd
    hvd.init()
    assert float(hvd.allreduce(torch.ones(()), op=hvd.Sum)) == hvd.size()


def mismatch(hvd: ModuleType) -> None:
    """An error on every rank, from a collective."""
    hvd.allreduce(torch.zeros(1 + hvd.rank()))
    raise HorovodInternalError("a rank alone agrees with itself")


def one_rank_fails(hvd: ModuleType) -> None:
    """An error on the last rank, which the others are not told."""
    if hvd.rank() == hvd.size() - 1:
        raise HorovodInternalError("injected")


FAILURES: dict[str, Callable[[ModuleType], None]] = {
    "on every rank": mismatch,
    "on one rank": one_rank_fails,
}


def train(hvd: ModuleType, fail: Callable[[ModuleType], None] | None, where: str) -> tuple[list[Tensor], list[int]]:
    """Train for some steps with one failure in the fourth, at a place; the parameters, and the steps that were run."""
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = TorchState(model=model, optimizer=optimizer, step=0)
    steps, failed = [], False

    def may_fail(place: str) -> None:
        nonlocal failed
        if fail is not None and place == where and state.step == 3 and not failed:
            failed = True
            fail(hvd)

    @run
    def loop(state: TorchState, answer: int) -> int:
        while state.step < STEPS:
            steps.append(state.step)
            optimizer.zero_grad()
            loss_of(model, share(hvd, whole_batch(state.step))).backward()
            may_fail("before the step")
            optimizer.step()
            may_fail("after the step")
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        may_fail("at the end")
        return answer

    assert loop(state, answer=42) == 42
    return list(model.parameters()), steps


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("where", ["before the step", "after the step"])
def test_the_result_is_that_of_a_run_without_the_error(job: ModuleType, where: str, kind: str) -> None:
    expected, steps = train(job, None, where)
    assert steps == list(range(STEPS))
    parameters, steps = train(job, FAILURES[kind], where)
    # Back to the commit after two steps, on every rank.
    assert steps[-3:] == [2, 3, 4]
    assert len(steps) > STEPS
    assert same_on_all_ranks(parameters)
    assert all(torch.equal(own, other) for own, other in zip(parameters, expected, strict=True))


def test_a_rank_that_fails_at_the_very_end_is_not_left_alone(job: ModuleType) -> None:
    runs = 0

    @run
    def loop(state: ObjectState) -> list[int]:
        nonlocal runs
        runs += 1
        if runs == 1:
            one_rank_fails(job)
        return job.allgather_object(state.value) if runs > 1 else []

    assert loop(ObjectState(value=job.rank())) == [0] * job.size()
    assert runs == 2


def test_callbacks_and_process_sets_after_a_restart(hvd: ModuleType) -> None:
    alone = [hvd.ProcessSet([rank]) for rank in range(hvd.size())] if hvd.size() > 1 else []
    hvd.shutdown()
    hvd.init(process_sets=alone)
    mine = alone[hvd.rank()] if alone else hvd.global_process_set
    events: list[str] = []

    @run
    def loop(state: ObjectState) -> None:
        events.append(f"run {state.value}")
        if len(events) == 1:
            state.value = 7
            mismatch(hvd)
        assert float(hvd.allreduce(torch.tensor(2.0), process_set=mine)) == 2.0

    state = ObjectState(value=1)
    state.register_reset_callbacks([lambda: events.append(f"reset {state.value} of {hvd.size()}")])
    loop(state)
    assert events == ["run 1", f"reset 1 of {hvd.size()}", "run 1"]
    assert [each.process_set_id for each in alone] == list(range(1, len(alone) + 1))
    hvd.shutdown()
    hvd.init()


class Counter(State):
    """A state of one's own, as Horovod's documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.value = self.saved = 0

    def save(self) -> None:
        self.saved = self.value

    def restore(self) -> None:
        self.value = self.saved

    def sync(self) -> None:
        self.value = int(hvlike.broadcast(torch.tensor(self.value), root_rank=0))
        self.save()


def test_a_state_of_ones_own_goes_back_to_its_commit(job: ModuleType) -> None:
    seen: list[int] = []

    @run
    def loop(state: Counter) -> None:
        seen.append(state.value)
        state.value += 1
        if len(seen) == 1:
            state.commit()
            state.value = 99
            mismatch(job)

    state = Counter()
    loop(state)
    assert (seen, state.value, state.commits) == ([0, 1], 2, 1)


def test_an_interrupt_keeps_the_state_and_may_skip_sync(job: ModuleType) -> None:
    seen: list[int] = []

    @run
    def loop(state: ObjectState) -> None:
        seen.append(state.value)
        if len(seen) < 3:
            state.value = job.rank() + 10 * len(seen)
            raise HostsUpdatedInterrupt(skip_sync=len(seen) == 2)

    loop(ObjectState(value=1))
    assert seen == [1, 10, job.rank() + 20]


@pytest.mark.mpi(min_size=2)
def test_sync_is_skipped_on_all_ranks_or_on_none(job: ModuleType) -> None:
    seen: list[int] = []

    @run
    def loop(state: ObjectState) -> None:
        seen.append(state.value)
        if len(seen) == 1:
            state.value = job.rank() + 10
            raise HostsUpdatedInterrupt(skip_sync=job.rank() != 0)

    loop(ObjectState(value=1))
    assert seen == [1, 10]


@pytest.mark.parametrize("retries", [0, 2])
def test_it_gives_up_on_every_rank_when_nothing_gets_better(job: ModuleType, retries: int) -> None:
    runs = 0

    @run(retries=retries)
    def loop(state: ObjectState) -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            # Only failures without progress count.
            state.commit()
        mismatch(job)

    text = rf"gives up: {retries + 1} failures in a row without a commit .* The last one on this rank: "
    with pytest.raises(HorovodInternalError, match=text):
        loop(ObjectState())
    assert runs == (1 if retries == 0 else retries + 2)


def test_other_exceptions_pass(job: ModuleType) -> None:
    @run
    def loop(state: ObjectState) -> None:
        """Its text."""
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop(ObjectState())
    assert (loop.__name__, loop.__doc__) == ("loop", "Its text.")


def test_wrong_arguments(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"retries must be a whole number of at least 0, got -1"):
        run(retries=-1)
    with pytest.raises(UsageError, match="decorates a function, got int"):
        run(3)
    with pytest.raises(UsageError, match=r"the first argument of <lambda>\(\) must be an elastic state, got dict"):
        run(lambda state: None)({})
