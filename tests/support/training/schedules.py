"""Random schedules of inputs, joinables and failures; also a program: mpirun -n 4 python schedules.py SEED COUNT."""

import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvlike.errors import JoinError
from hvlike.join import Join, Joinable
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

if __name__ == "__main__":
    from counters import Counter
else:
    from support.training.counters import Counter


class Stop(Exception):
    """What a rank fails by."""


class Trainer:
    """Joinables and what they do in one iteration."""

    def __init__(self, joinables: list[Joinable], iterate: Callable[[Tensor], None], state: Callable[[], Any]) -> None:
        self.joinables = joinables
        self.iterate = iterate
        self.state = state


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def with_optimizer(hvd: ModuleType, *, passes: int = 1, counted: str = "") -> Trainer:
    """A DistributedOptimizer; counted: also a joinable of one's own, "before" or "after" it."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), backward_passes_per_step=passes
    )
    counter = Counter()

    def iterate(data: Tensor) -> None:
        if counted == "before":
            counter()
        optimizer.zero_grad()
        for _ in range(passes):
            model(data).square().mean().backward()
        optimizer.step()
        if counted == "after":
            counter()

    joinables = {"": [optimizer], "before": [counter, optimizer], "after": [optimizer, counter]}[counted]
    return Trainer(joinables, iterate, lambda: [p.tolist() for p in model.parameters()])


def with_two_optimizers(hvd: ModuleType) -> Trainer:
    """Their numbers of steps differ; a metric is averaged between them."""
    models = [model_of(), model_of()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9), each.named_parameters())
        for each in models
    ]

    def iterate(data: Tensor) -> None:
        for each in (0, 1, 0):
            optimizers[each].zero_grad()
            models[each](data).square().mean().backward()
            optimizers[each].step()
            hvd.allreduce(torch.ones(1))

    return Trainer(list(optimizers), iterate, lambda: [p.tolist() for each in models for p in each.parameters()])


def with_modules(hvd: ModuleType, *, sharded: bool, counted: bool = False) -> Trainer:
    """A DistributedDataParallel with buffers; sharded: and a ZeroRedundancyOptimizer."""
    ddp = DistributedDataParallel(model_of())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01) if sharded else None
    optimizer = zero or torch.optim.SGD(ddp.parameters(), lr=0.1)
    counter = Counter()
    joinables: list[Joinable] = [counter] if counted else []
    joinables += [ddp, zero] if zero is not None else [ddp]

    def iterate(data: Tensor) -> None:
        if counted:
            counter()
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()

    return Trainer(joinables, iterate, lambda: [value.tolist() for value in ddp.state_dict().values()])


def with_counters(hvd: ModuleType) -> Trainer:
    """Joinables of one's own alone."""
    counters = [Counter(), Counter(sums=2), Counter(sums=0)]

    def iterate(data: Tensor) -> None:
        for counter in counters:
            counter()

    return Trainer(list(counters), iterate, lambda: [counter.tensor.item() for counter in counters])


KINDS: dict[str, Callable[[ModuleType], Trainer]] = {
    "optimizer": with_optimizer,
    "accumulating": lambda hvd: with_optimizer(hvd, passes=2),
    "counter, optimizer": lambda hvd: with_optimizer(hvd, counted="before"),
    "optimizer, counter": lambda hvd: with_optimizer(hvd, counted="after"),
    "two optimizers": with_two_optimizers,
    "module": lambda hvd: with_modules(hvd, sharded=False),
    "module, sharded": lambda hvd: with_modules(hvd, sharded=True),
    "counter, module, sharded": lambda hvd: with_modules(hvd, sharded=True, counted=True),
    "counters": with_counters,
}


def run_schedules(hvd: ModuleType, seed: int, count: int) -> dict[str, int]:
    """Run so many random schedules; how many ended how. Joinables are used again until a schedule fails."""
    shared = random.Random(seed)
    trainers: dict[str, Trainer] = {}
    ends: dict[str, int] = {}
    for number in range(count):
        kind = shared.choice(list(KINDS))
        counts = [shared.choice([0, 1, 2, 3, 6]) for _ in range(hvd.size())]
        throws = shared.random() < 0.15
        # Who fails, and in which of its iterations.
        failing = shared.randrange(hvd.size()), shared.randrange(4)
        fails = shared.random() < 0.15 and failing[1] < counts[failing[0]]
        text = f"schedule {number} of seed {seed}: {kind}, {counts}, throws {throws}, fails {fails and failing}"
        if kind not in trainers:
            trainers[kind] = KINDS[kind](hvd)
        end = _run(hvd, trainers[kind], counts, throws, failing if fails else (-1, -1), text)
        ends[end] = ends.get(end, 0) + 1
        if end in ("failed", "thrown"):
            # The ranks may have made different numbers of steps.
            del trainers[kind]
        elif not fails:
            states = hvd.allgather_object(trainers[kind].state())
            assert all(state == states[0] for state in states), text
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size(), text
    return ends


def _run(
    hvd: ModuleType, trainer: Trainer, counts: list[int], throws: bool, failing: tuple[int, int], text: str
) -> str:
    """One schedule on this rank; how it ended."""
    rank = hvd.rank()
    done = 0
    end: Exception | None = None
    try:
        with Join(trainer.joinables, throw_on_early_termination=throws):
            for step in range(counts[rank]):
                if failing == (rank, step):
                    raise Stop(text)
                trainer.iterate(torch.full((5, 3), float(step)))
                done += 1
    except (Stop, RuntimeError) as error:
        end = error
    if end is None:
        assert done == counts[rank], text
        return "joined"
    if isinstance(end, (Stop, JoinError)):
        assert isinstance(end, Stop) is (failing[0] == rank), (text, end)
        return "failed"
    assert throws, (text, end)
    assert "exhausted" in str(end), (text, end)
    assert done == min(counts), (text, end)
    return "thrown"


if __name__ == "__main__":
    import hvlike

    hvlike.init()
    print(hvlike.rank(), run_schedules(hvlike, int(sys.argv[1]), int(sys.argv[2])), flush=True)
    hvlike.shutdown()
