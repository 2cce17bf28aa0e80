"""Models of several kinds, inputs for ranks that have different numbers of them, and one process that sees them all."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

ROWS, WIDTH = 4, 12
EPS = 1e-3
"""Dividing a gradient by its own size makes the rounding of a tiny one as large as any update; this keeps it small."""


class Perceptron(nn.Module):
    """Layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 3))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return self.layers(inputs)


class Convolutions(nn.Module):
    """With batch normalisation, and so with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4), nn.Flatten()
        )
        self.last = nn.Linear(32, 2)

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return self.last(self.layers(inputs.unsqueeze(1)))


class Transformer(nn.Module):
    """One encoder layer over rows of three values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return self.layer(self.embedding(inputs.view(len(inputs), -1, 3)))


class Branches(nn.Module):
    """One branch in even steps, the other in odd ones, a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return self.branches[step % 2](self.first(inputs).tanh())


class Shared(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return self.second(self.first(inputs).tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "convolutions with batch norm": Convolutions,
    "transformer": Transformer,
    "unused parameters": Branches,
    "shared parameters": Shared,
}

COUNTS: dict[str, Callable[[int], Sequence[int]]] = {
    "even": lambda size: [3] * size,
    "more on each": lambda size: range(1, 1 + size),
    "none on the first": lambda size: [0, *range(3, 2 + size)],
    "fewer on each": lambda size: range(size, 0, -1),
    "none on the last": lambda size: [*range(2, 1 + size), 0],
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def inputs_of(step: int, part: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10000 + 100 * step + 10 * part + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: Tensor, step: int) -> Tensor:
    return model(inputs, step).square().mean()


def reference(
    name: str,
    counts: Sequence[int],
    passes: int,
    clip: float | None,
    *,
    by_active: bool = False,
) -> nn.Module:
    """One process: in each step the mean over the ranks that it stands for.

    by_active: over those with inputs alone; else the others give nothing.
    """
    model = make(name)
    optimizer = Adam(model.parameters(), lr=0.01, eps=EPS)
    for step in range(max(counts)):
        optimizer.zero_grad()
        ranks = sum(count > step for count in counts) if by_active else len(counts)
        for part in range(passes):
            for rank, count in enumerate(counts):
                if count > step:
                    (loss_of(model, inputs_of(step, part, rank), step) / passes / ranks).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def same_optimizers(hvd: ModuleType, optimizer: Any) -> bool:
    """Whether options and state are equal on all ranks, bitwise."""
    options = [[(key, group[key]) for key in group if key != "params"] for group in optimizer.param_groups]
    states = [
        (key, index, value.tolist() if isinstance(value, Tensor) else value)
        for index, entry in sorted(optimizer.state_dict()["state"].items())
        for key, value in sorted(entry.items())
    ]
    everybody = hvd.allgather_object((options, states))
    return all(each == everybody[0] for each in everybody)


OPTIONS: list[tuple[int, float | None]] = [(1, None), (2, 0.05)]
"""Passes, and the norm that gradients are clipped to. In turn: all combinations take long."""

CASES = [
    (name, schedule, *OPTIONS[(number + place) % 2])
    for number, name in enumerate(MODELS)
    for place, schedule in enumerate(COUNTS)
]
