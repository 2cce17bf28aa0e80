"""What the programs of several kinds have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (1, 3, 700, 20_000)


def expect(found: Any, wanted: Any, what: str) -> None:
    """Compare tensors, or plain values."""
    if isinstance(wanted, Tensor):
        assert found.shape == wanted.shape, f"{what}: {list(found.shape)}, expected {list(wanted.shape)}"
        assert torch.allclose(found, wanted), f"{what}: {found.flatten()[:4]}, expected {wanted.flatten()[:4]}"
    else:
        assert found == wanted, f"{what}: {found}, expected {wanted}"


@dataclass
class Operation:
    """One operation, as each member of its set makes it."""

    number: int
    what: str
    length: int
    root: int
    members: Sequence[int]

    def begin(self, hvd: Any, rank: int, process_set: Any) -> Callable[[], None]:
        """Begin it; what is returned ends it and checks it."""
        name = f"{self.what} {self.number}"
        size, place = len(self.members), self.members.index(rank)
        mine = torch.arange(self.length, dtype=torch.float64) + 10.0 * place
        everybody = [torch.arange(self.length, dtype=torch.float64) + 10.0 * each for each in range(size)]
        options = {"name": name, "process_set": process_set}
        total = torch.stack(everybody).sum(0)

        def ending(handle: Any, wanted: Any) -> Callable[[], None]:
            return lambda: expect(hvd.synchronize(handle), wanted, f"rank {rank}: {name}")

        if self.what == "sum":
            return ending(hvd.allreduce_async(mine, op=hvd.Sum, **options), total)
        if self.what == "average":
            return ending(hvd.allreduce_async(mine, op=hvd.Average, **options), total / size)
        if self.what == "max":
            return ending(hvd.allreduce_async(mine, op=hvd.Max, **options), everybody[-1])
        if self.what == "gather":
            rows = [torch.full((each % 3, 2), float(each)) for each in range(size)]
            return ending(hvd.allgather_async(rows[place], **options), torch.cat(rows))
        if self.what == "broadcast":
            root = self.root % size
            return ending(hvd.broadcast_async(mine, self.members[root], **options), everybody[root])
        assert self.what == "group"
        handle = hvd.grouped_allreduce_async([mine, mine * 2], op=hvd.Sum, **options)

        def end() -> None:
            for found, factor in zip(hvd.synchronize(handle), (1, 2), strict=True):
                expect(found, total * factor, f"rank {rank}: {name}")

        return end


KINDS_OF_OPERATIONS = ("sum", "average", "max", "gather", "broadcast", "group")


def make_model() -> nn.Sequential:
    """The same on all ranks, whatever the generator of random numbers has given to others."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape))
    return model


def batch(step: int, rank: int) -> Tensor:
    """What a rank trains with in a step."""
    return torch.linspace(-1, 1, 6).view(2, 3) * (1 + step) + rank


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a rank in a step."""
    loss: Tensor = model(batch(step, rank)).square().mean()
    return loss
