"""Steps of a ZeroRedundancyOptimizer send no control message, inside a Join context or outside of it."""

from collections.abc import Callable
from types import ModuleType

import pytest
from support.training.zero_problem import batch, loss_of, net
from torch.optim import SGD

from hvlike.collectives.session.context import current
from hvlike.errors import UsageError
from hvlike.join import Join
from hvlike.optim import ZeroRedundancyOptimizer

LATE = {"waiting", "resumed"}
"""A rank that has waited for half a second says so. That is about time, and a busy machine may be so slow."""


def control_during(work: Callable[[], None]) -> dict[str, int]:
    before = current().fabric.traffic.snapshot()
    work()
    sent = current().fabric.traffic.snapshot() - before
    return {kind: count for kind, count in sent.control.items() if kind not in LATE}


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("joins", [False, True])
def test_steps_are_data_alone(hvd: ModuleType, reduces: bool, joins: bool) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, reduce_gradients=reduces, lr=0.01)

    def steps() -> None:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()

    # What was agreed when it was made has reached all ranks once they have made steps.
    steps()
    if joins:
        with Join([optimizer]):
            sent = control_during(steps)
            # Who leaves the context says so.
            hvd.barrier()
    else:
        sent = control_during(steps)
    hvd.barrier()
    assert sent == {}


def test_groups_are_not_added_inside_a_context(hvd: ModuleType) -> None:
    model = net()
    first, *others = model.parameters()
    optimizer = ZeroRedundancyOptimizer(others, SGD, lr=0.01)
    with Join([optimizer]), pytest.raises(UsageError, match="inside a Join context"):
        optimizer.add_param_group({"params": [first]})
    optimizer.add_param_group({"params": [first]})
    assert len(optimizer.param_groups) == 2
