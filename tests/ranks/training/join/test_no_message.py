"""What hvlike itself brings costs no message in an iteration of a Join context, whether all ranks are there or not."""

from types import ModuleType

import torch
from support.training.counters import Counter
from torch import nn

from hvlike.collectives.session.context import current
from hvlike.join import Join

LATE = {"waiting", "resumed"}
"""A rank that has waited for half a second says so."""


def control_messages() -> dict[str, int]:
    return {kind: n for kind, n in current().fabric.traffic.snapshot().control.items() if kind not in LATE}


def test_steps_of_an_optimizer(hvd: ModuleType) -> None:
    rank = hvd.rank()
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with Join([optimizer], divide_by_initial_world_size=False):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            before = control_messages()
            optimizer.step()
            # In the first one the ranks agree on a plan.
            assert step == 0 or control_messages() == before


def test_a_joinable_of_ones_own_has_its_heartbeat(hvd: ModuleType) -> None:
    counter = Counter(sums=0)
    with Join([counter]):
        before = control_messages()
        handle = Join.notify_join_context(counter)
        assert handle is not None
        handle.wait()
        assert (control_messages() != before) == (hvd.size() > 1)
