"""Only some of the ranks share an optimizer; the others are left alone."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.training.zero_problem import batch, difference, loss_of, net
from torch.optim import SGD, Adam

from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.errors import UsageError
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

EPOCHS = 5


@pytest.fixture
def evens(hvd: ModuleType) -> Iterator[ProcessSet]:
    """The even ranks, where that is not all of them."""
    if hvd.size() == 1:
        pytest.skip("all ranks are even")
    process_set = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    yield process_set
    hvd.remove_process_set(process_set)


@pytest.mark.parametrize("reduces", [False, True])
def test_the_set_trains_as_one_process_would(hvd: ModuleType, evens: ProcessSet, reduces: bool) -> None:
    if not evens.included():
        with pytest.raises(UsageError):
            ZeroRedundancyOptimizer(net().parameters(), SGD, process_set=evens, lr=0.1)
        return
    ours, plain = net(), net()
    place, size = evens.rank(), evens.size()
    model = ours if reduces else DistributedDataParallel(ours, process_set=evens)
    optimizer = ZeroRedundancyOptimizer(
        ours.parameters(), SGD, process_set=evens, reduce_gradients=reduces, lr=0.1, momentum=0.9
    )
    reference = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for each, stepper, inputs in (
            (model, optimizer, batch(epoch)[place::size]),
            (plain, reference, batch(epoch)),
        ):
            stepper.zero_grad()
            loss_of(each, inputs).backward()
            stepper.step()
        assert difference(ours, plain) < 1e-6
    assert (optimizer.rank, optimizer.world_size) == (place, size)
    target = size - 1
    optimizer.consolidate_state_dict(to=target)
    if place == target:
        whole = optimizer.state_dict()["state"]
        for number, values in reference.state_dict()["state"].items():
            torch.testing.assert_close(whole[number]["momentum_buffer"], values["momentum_buffer"])


def test_uneven_inputs_in_a_set(hvd: ModuleType, evens: ProcessSet) -> None:
    if not evens.included():
        return
    ours, plain = net(), net()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), Adam, process_group=evens, lr=0.01)
    reference = Adam(plain.parameters(), lr=0.01)
    with Join([optimizer]):
        for step in range(1 + hvd.rank()):
            optimizer.zero_grad()
            loss_of(ours, batch(step)).backward()
            optimizer.step()
    for step in range(1 + (hvd.size() - 1) // 2 * 2):
        reference.zero_grad()
        loss_of(plain, batch(step)).backward()
        reference.step()
    assert difference(ours, plain) == 0
