"""Random programs of several workers: the same seed makes the same program, in a LocalWorld and in OneProcess."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from support.autograd.local_functions import none_for_right, sum_and_product
from support.autograd.local_world import LocalWorld
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

ROWS, COLUMNS = 2, 3


class LocalProgram:
    """A forward pass; its leaves, roots and what hooks have counted."""

    def __init__(self, world: LocalWorld, seed: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.world = world
        self.size = len(world.workers)
        self.leaves: list[tuple[int, Tensor]] = []
        self.retained: list[Tensor] = []
        self.nodes: list[Node] = []
        self.counts: dict[str, int] = {}
        """How often each hook has run."""
        self.values: list[list[Tensor]] = [[self.new_leaf(rank)] for rank in range(self.size)]
        self.spoilt: list[Callable[[], Tensor]] = []
        for _ in range(steps):
            self.random.choices((self.compute, self.carry, self.change, self.hook), (6, 3, 1, 2))[0]()
        self.roots = [self.root() for _ in range(self.random.choice((1, 1, 2, 3)))]

    def new_leaf(self, rank: int) -> Tensor:
        leaf = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=self.generator).requires_grad_()
        self.leaves.append((rank, leaf))
        return leaf

    def some(self, rank: int) -> Tensor:
        """A value of the worker; rather one of the last."""
        values = self.values[rank]
        return values[max(self.random.randrange(len(values)), self.random.randrange(len(values)))]

    def compute(self) -> None:
        rank = self.random.randrange(self.size)
        left, right = self.some(rank), self.some(rank)
        if self.random.random() < 0.3:
            right = self.random.choice([leaf for owner, leaf in self.leaves if owner == rank])
        if self.random.random() < 0.15:
            right = self.new_leaf(rank)
        outputs = self.random.choice(_OPERATIONS)(left, right)
        # Without the sines values would grow.
        self.values[rank] += [output.sin() if self.random.random() < 0.5 else output for output in outputs]

    def carry(self) -> None:
        source, to = self.random.randrange(self.size), self.random.randrange(self.size)
        tensors = [self.some(source) for _ in range(self.random.choice((1, 1, 2, 3)))]
        self.values[to] += self.world.carry(list({id(tensor): tensor for tensor in tensors}.values()), source, to)

    def change(self) -> None:
        """In place: of a fresh value, a view of one, or of one that has just arrived; none that a backward needs."""
        rank = self.random.randrange(self.size)
        value, by = self.some(rank), self.some(rank)
        arrives = self.random.random() < 0.3
        value = self.world.carry([value], rank, rank)[0] if arrives else value + 1
        if value.requires_grad and self.random.random() < 0.5:
            value[self.random.randrange(ROWS)].mul_(by[0])
        elif value.requires_grad:
            value.mul_(by)
        self.values[rank].append(value)

    def hook(self) -> None:
        """Hooks that are not linear: they show whether they see the complete gradient."""
        value = self.some(self.random.randrange(self.size))
        if not value.requires_grad:
            return
        kind = self.random.choice(("tensor", "retain", "pre", "post"))
        name = f"{kind} {len(self.counts)}"
        node: Any = value.grad_fn
        if kind == "tensor":
            watch: Any = value.register_hook
            watch(lambda gradient: self.seen(name, gradient))
        elif kind == "retain":
            value.retain_grad()
            self.retained.append(value)
            return
        elif node is None or type(node).__name__ in ("ReceiveBackward", "CloneBackward0"):
            # What has just arrived differs by the node that it comes from.
            return
        elif kind == "pre":
            node.register_prehook(lambda outer: tuple(self.seen(name, gradient) for gradient in outer))
            self.nodes.append(node)
        else:
            node.register_hook(lambda inner, outer: tuple(self.seen(name, gradient) for gradient in inner))
            self.nodes.append(node)
        self.counts[name] = 0

    def seen(self, name: str, gradient: Tensor | None) -> Any:
        if gradient is None:
            # An output of a node that has others: of what arrives together, all is one node.
            return None
        self.counts[name] += 1
        return gradient.tanh()

    def root(self) -> Tensor:
        """A scalar of worker 0."""
        rank = self.random.randrange(self.size)
        tensors = [value for value in (self.some(rank) for _ in range(3)) if value.requires_grad]
        tensors = tensors or [self.values[rank][0]]
        return torch.stack([(value * value).mean() for value in self.world.carry(tensors, rank, 0)]).sum()


def _product(left: Tensor, right: Tensor) -> list[Tensor]:
    return [left @ right.t() @ left * 0.3]


def _parts(left: Tensor, right: Tensor) -> list[Tensor]:
    rows = left.unbind(0)
    return [torch.stack([rows[1], right[0]]), torch.cat((*left.chunk(3, dim=1)[:2], right[:, :1]), dim=1)]


def _again(left: Tensor, right: Tensor) -> list[Tensor]:
    return [checkpoint(lambda first, second: (first * second).exp().cos(), left, right, use_reentrant=False)]


_OPERATIONS: list[Callable[[Tensor, Tensor], list[Tensor]]] = [
    lambda left, right: [left + right],
    lambda left, right: [left * right],
    lambda left, right: [left + right[0]],
    lambda left, right: [torch.where(left > 0, left, right)],
    lambda left, right: [left.t().reshape(ROWS, COLUMNS) * right],
    lambda left, right: [left.detach() * 0.5],
    lambda left, right: [left.sum() * right],
    lambda left, right: list(sum_and_product(left, right)),
    lambda left, right: [none_for_right(left, right * 1)],
    _product,
    _parts,
    _again,
]
