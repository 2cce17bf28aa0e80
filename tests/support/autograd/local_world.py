"""Workers of one process for tests of the local machine: tensors are handed over at once, gradients in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hvlike.autograd.context import DistributedContext, Recv, new_send
from hvlike.autograd.local_backward import Emit, LocalBackward
from hvlike.autograd.protocol import Gradients


class Listener:
    """Stands for a backward that its context tells of events."""

    def recorded(self, recv: Recv) -> None: ...

    def withdrawn(self, send: int) -> None: ...

    def released(self) -> None: ...


class LocalWorld:
    """Some workers with one context; `passes` are the backwards of the last call of `backward`, by worker."""

    def __init__(self, size: int = 2, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.workers = [DistributedContext(1) for _ in range(size)]
        """The context on each worker."""
        self.passes: list[LocalBackward] = []
        self.messages = 0

    def carry(self, tensors: Sequence[Tensor], source: int, to: int) -> list[Tensor]:
        """What arrives of these tensors at another worker."""
        copies = [tensor.detach().clone() for tensor in tensors]
        graded = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if graded:
            self.messages += 1
            number = self.messages
            self.workers[source].record_send(new_send(number, to, "carry", [tensors[place] for place in graded]))
            outputs = self.workers[to].record_recv(number, source, [copies[place].requires_grad_() for place in graded])
            for place, output in zip(graded, outputs, strict=True):
                copies[place] = output
        return copies

    def carry_one(self, tensor: Tensor, source: int = 0, to: int = 1) -> Tensor:
        return self.carry([tensor], source, to)[0]

    def backward(self, roots: Sequence[Tensor], *, at: int = 0, retain_graph: bool = False) -> None:
        """Backward from roots on one worker, until all are finished; every recv answers exactly once."""
        flying: list[Callable[[], None]] = []
        self.passes = []
        for rank, context in enumerate(self.workers):
            edges = [(get_gradient_edge(root), torch.ones_like(root)) for root in roots] if rank == at else []
            emit = self._emitter(flying, context)
            self.passes.append(LocalBackward(context, edges, emit, listener=Listener(), retain_graph=retain_graph))
        for rank in self.random.sample(range(len(self.workers)), len(self.workers)):
            self.passes[rank].engage(None)
        steps = [local.step for local in self.passes]
        while flying or steps:
            # Some messages are resolved before the next step is made, as when several have arrived meanwhile.
            for _ in range(self.random.randrange(len(flying) + 1)):
                flying.pop(self.random.randrange(len(flying)))()
            for step in self.random.sample(steps, len(steps)) if steps else [local.step for local in self.passes]:
                step()
            steps = []
        assert all(local.finished for local in self.passes)
        for context in self.workers:
            context.backwards.clear()

    def _emitter(self, flying: list[Callable[[], None]], context: DistributedContext) -> Emit:
        answered: set[int] = set()

        def emit(recv: int, rank: int, gradients: Gradients | None) -> None:
            assert recv not in answered
            assert gradients is None or len(gradients) == context.recvs[recv].count
            answered.add(recv)
            copies = gradients and [None if gradient is None else gradient.detach().clone() for gradient in gradients]
            flying.append(lambda: self.passes[rank].resolve(recv, copies))

        return emit


class OneProcess(LocalWorld):
    """The same programs with nobody else: ordinary autograd."""

    def carry(self, tensors: Sequence[Tensor], source: int, to: int) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]

    def backward(self, roots: Sequence[Tensor], *, at: int = 0, retain_graph: bool = False) -> None:
        torch.autograd.backward(list(roots), retain_graph=retain_graph)
