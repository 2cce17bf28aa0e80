"""Once the plan is made, steps of any wrapper send no control message: on one node, on several, in a Join context."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType

import pytest
import torch
from support.training.counters import Counter
from support.training.problem import make_model
from support.training.ways import Wrapped
from torch import nn

from hvlike.collectives.session.context import current
from hvlike.join import Join
from hvlike.transport.messages.traffic import Sent

STEPS = 5

LATE = {"waiting", "resumed", "inspect", "answer"}
"""A rank that has waited for half a second says so, and others are asked. A busy machine may be so slow."""


class Branches(nn.Module):
    """Layers side by side, whose gradients come in the reverse of the order in which they were used."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        order = [*self.layers[turn:], *self.layers[:turn]]
        return torch.stack([layer(x) for layer in order]).sum()


def steps(hvd: ModuleType, count: int, *, width: int = 8, turned: bool = False) -> Callable[[], None]:
    """Returns what runs `count` steps; the first of them makes the plan, and ranks may start with other layers."""
    model = Branches(width, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    taken = 0

    def run() -> None:
        nonlocal taken
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, width), (hvd.rank() + taken) % 4 if turned else 0).backward()
            optimizer.step()
            taken += 1

    return run


def sent_during(work: Callable[[], None]) -> Sent:
    before = current().fabric.traffic.snapshot()
    work()
    return current().fabric.traffic.snapshot() - before


def control(sent: Sent) -> dict[str, int]:
    return {kind: count for kind, count in sent.control.items() if kind not in LATE}


@pytest.mark.parametrize("turned", [False, True], ids=["same order", "other order on every rank and step"])
def test_steps_on_one_node(hvd: ModuleType, turned: bool) -> None:
    run = steps(hvd, STEPS, turned=turned)
    learning = sent_during(run)
    assert (sum(control(learning).values()) > 0) == (hvd.size() > 1)
    sent = sent_during(run)
    assert control(sent) == {}
    assert (sent.data_messages, sent.collectives) == (0, 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("a_node", [1, 2])
@pytest.mark.parametrize("width", [8, 256], ids=["small", "large"])
def test_steps_across_nodes(
    hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None], a_node: int, width: int
) -> None:
    restarted({"HVLIKE_RANKS_PER_NODE": str(a_node)})
    run = steps(hvd, STEPS, width=width)
    run()
    sent = sent_during(run)
    assert control(sent) == {}
    crosses = hvd.cross_size() > 1 and (hvd.is_homogeneous() or hvd.local_rank() == 0)
    if width > 8:
        assert (sent.data_messages + sent.collectives > 0) == crosses
    else:
        # What is one chunk on a node crosses through one of its ranks.
        assert any(hvd.allgather_object(sent.data_messages + sent.collectives)) == (hvd.size() > a_node)


@pytest.mark.mpi(min_size=2)
def test_steps_beside_backward(hvd: ModuleType, restarted: Callable[[Mapping[str, str]], None]) -> None:
    restarted({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "256"})
    run = steps(hvd, STEPS)
    run()
    assert control(sent_during(run)) == {}


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_late_costs_reports_at_most(hvd: ModuleType) -> None:
    run = steps(hvd, 1)
    run()

    def late() -> None:
        if hvd.rank() == 1:
            time.sleep(0.7)  # longer than the half second after which a waiting rank says so
        run()

    assert control(sent_during(late)) == {}


@pytest.mark.mpi(min_size=2)
def test_a_named_allreduce_would_be_seen(hvd: ModuleType) -> None:
    run = steps(hvd, 1)
    run()

    def with_a_metric() -> None:
        run()
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="metric"))

    sent = sent_during(with_a_metric)
    assert control(sent) == ({"responses": hvd.size() - 1} if hvd.rank() == 0 else {"ready": 1})


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("way", ["optimizer", "find unused", "zero", "ddp, zero"])
def test_every_wrapper(hvd: ModuleType, way: str, joins: bool) -> None:
    """With buffers; whether all ranks have inputs or not."""
    model = make_model()
    model.register_buffer("seen", torch.zeros(3))
    wrapped = Wrapped(way, model)
    # What was agreed when it was made has reached all ranks once they have made steps.
    for step in range(3):
        wrapped.step(hvd, step)

    with Join(wrapped.joinables, enable=joins, divide_by_initial_world_size=False):
        # Who leaves the context says so: that is after the last one.
        sent = [sent_during(partial(wrapped.step, hvd, step)) for step in range(1 + hvd.rank() * joins)]
    assert [control(each) for each in sent] == [{}] * len(sent)


def test_a_joinable_of_ones_own_has_its_heartbeat(hvd: ModuleType) -> None:
    counter = Counter(sums=0)
    with Join([counter]):

        def beat() -> None:
            handle = Join.notify_join_context(counter)
            assert handle is not None
            handle.wait()

        assert (control(sent_during(beat)) != {}) == (hvd.size() > 1)
