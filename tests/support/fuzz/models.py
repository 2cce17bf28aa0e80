"""Small networks of many kinds of parts: what a model may be made of, in a few numbers each.

A network maps rows of four numbers to two. Each part between its first and its last layer adds something to the rows,
so that it may be left out of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES, WORDS = 3, 4, 2, 5

device = torch.device("cpu")
"""Of the tensors of this rank. The process that judges has them there, too."""


class Part(nn.Module):
    """Maps rows to rows; `words` are whole numbers that come with the rows."""

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        raise NotImplementedError


class Layer(Part):
    """A layer of torch that knows nothing of words."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.times = times

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        for _ in range(self.times):
            rows = self.layer(rows)
        return rows


class SyncNorm(Layer):
    """Batch normalisation that its world makes one over all ranks."""


class Words(Part):
    """An embedding: its gradient is sparse, or most of its rows are zeros."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=sparse)

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return rows * self.table(words)


class Scalar(Part):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return rows * self.factor


class Complex(Part):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        turned = rows * self.phase
        return turned.real - turned.imag


class Half(Part):
    """A layer of another dtype than its neighbours, and maybe with gradients of yet another one."""

    def __init__(self, dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.grad_dtype = grad_dtype
        self.set_grad_dtype()

    def set_grad_dtype(self) -> None:
        if self.grad_dtype is not None:
            for parameter in self.layer.parameters():
                parameter.grad_dtype = self.grad_dtype

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return self.layer(rows.to(self.layer.weight.dtype)).to(rows.dtype)


class Image(Part):
    """A convolution whose weights lie with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(2, WIDTH, (1, 2)).to(memory_format=torch.channels_last)

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return self.filters(rows.view(-1, 2, 1, 2)).flatten(1)


class EqualLazyLinear(nn.LazyLinear):
    """Gets its shape at the first forward, and then the same values everywhere."""

    def reset_parameters(self) -> None:
        if self.bias is not None and not isinstance(self.weight, UninitializedParameter):
            with torch.no_grad():
                self.weight.copy_(torch.linspace(-0.4, 0.5, self.weight.numel()).view_as(self.weight))
                self.bias.fill_(0.1)


class Empty(Part):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return rows + self.nothing.sum()


class Counting(Part):
    """Buffers of whole numbers that forward changes: in place, by a new tensor, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WORDS, dtype=torch.int32))
        self.register_buffer("history", torch.zeros(0))

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + torch.bincount(words, minlength=WORDS).to(torch.int32)
        self.history = torch.cat([self.history, rows.detach().mean().view(1)])
        return rows * 0.5


class SparseBuffer(Part):
    """A sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        mixing = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 2.0]])
        self.register_buffer("mixing", mixing.double().to_sparse())

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return torch.sparse.mm(self.mixing, rows.T).T


class Checkpointed(Part):
    """Computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not rows.requires_grad:
            return self.layer(rows)
        return checkpoint(self.layer, rows, use_reentrant=self.reentrant)


class Frozen(Part):
    """A layer that does not train from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return self.layer(rows)


class Tied(Part):
    """A layer that has the weight of another one, and a bias of its own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight = other.weight

    def forward(self, rows: Tensor, words: Tensor) -> Tensor:
        return self.layer(rows)


PARTS: dict[str, Callable[[nn.Linear], Part]] = {
    "linear": lambda first: Layer(nn.Linear(WIDTH, WIDTH)),
    "shared": lambda first: Layer(nn.Linear(WIDTH, WIDTH), times=2),
    "tied": Tied,
    "scalar": lambda first: Scalar(),
    "frozen": lambda first: Frozen(),
    "batch norm": lambda first: Layer(nn.BatchNorm1d(WIDTH)),
    "sync batch norm": lambda first: SyncNorm(nn.BatchNorm1d(WIDTH)),
    "embedding": lambda first: Words(sparse=False),
    "sparse embedding": lambda first: Words(sparse=True),
    "weight norm": lambda first: Layer(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "complex": lambda first: Complex(),
    "float32": lambda first: Half(torch.float32),
    "bfloat16": lambda first: Half(torch.bfloat16),
    "grad dtype": lambda first: Half(torch.bfloat16, torch.float32),
    "channels last": lambda first: Image(),
    "lazy": lambda first: Layer(EqualLazyLinear(WIDTH)),
    "empty": lambda first: Empty(),
    "counting": lambda first: Counting(),
    "sparse buffer": lambda first: SparseBuffer(),
    "checkpoint": lambda first: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda first: Checkpointed(reentrant=True),
}
"""By name, how to make a part; it is given the first layer of the network."""

OTHER_DTYPES = {"complex", "float32", "bfloat16", "grad dtype"}
WITHOUT_PARAMETERS = {"counting", "sparse buffer"}


class Network(nn.Module):
    """A first layer, the parts, and a last layer."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(PARTS[name](self.first) for name in names)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Tensor, words: Tensor, skipped: Collection[int] = ()) -> Tensor:
        rows = self.first(rows).tanh()
        for number, part in enumerate(self.parts):
            if number not in skipped:
                rows = rows + part(rows, words)
        return self.last(rows)

    def layer(self, number: int) -> nn.Module:
        """Return a part by its number, the first layer for -1, the last one for -2."""
        return {-1: self.first, -2: self.last}.get(number) or self.parts[number]


def make_network(names: Sequence[str]) -> Network:
    """Return a network with the same values wherever the names are the same."""
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # A generator of a GPU draws other values.
        with torch.device("cpu"):
            network = Network(names)
        return network.to(device)
    finally:
        torch.set_default_dtype(before)


def make_batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows and words of one rank; those of the ranks differ in size, so that no average is one by chance."""
    generator = torch.Generator().manual_seed(1000 * (number + 1) + rank)
    with torch.device("cpu"):
        rows = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * (1 + rank)
        words = torch.randint(WORDS, (ROWS,), generator=generator)
    return rows.to(device), words.to(device)
