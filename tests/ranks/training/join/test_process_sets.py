"""Join contexts of some of the ranks."""

from types import ModuleType

import pytest
import torch
from support.training.counters import AFTER, BEFORE, Counter
from torch import nn

from hvlike.errors import JoinError
from hvlike.join import Join

pytestmark = pytest.mark.mpi(min_size=3)


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
