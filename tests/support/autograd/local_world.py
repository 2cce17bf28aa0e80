"""Workers of one process for tests of the local machine: tensors are handed over at once, gradients in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hvlike.autograd.context import Recv, Send, attach, new_recv, new_send
from hvlike.autograd.local_backward import LocalBackward


class LocalWorker:
    """One worker's part of a context."""

    def __init__(self) -> None:
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Recv] = {}
        self.gradients: dict[Tensor, Tensor] = {}


class LocalWorld:
    """Some workers with one context; `passes` are the backwards of the last call of `backward`, by worker."""

    def __init__(self, size: int = 2, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.workers = [LocalWorker() for _ in range(size)]
        self.passes: list[LocalBackward] = []
        self.messages = 0

    def carry(self, tensors: Sequence[Tensor], source: int, to: int) -> list[Tensor]:
        """What arrives of these tensors at another worker."""
        copies = [tensor.detach().clone() for tensor in tensors]
        graded = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if graded:
            self.messages += 1
            number = self.messages
            self.workers[source].sends[number] = new_send(number, to, "carry", [tensors[place] for place in graded])
            recv = self.workers[to].recvs[number] = new_recv(number, source, len(graded))
            outputs = attach(recv, [copies[place].requires_grad_() for place in graded])
            for place, output in zip(graded, outputs, strict=True):
                copies[place] = output
        return copies

    def carry_one(self, tensor: Tensor, source: int = 0, to: int = 1) -> Tensor:
        return self.carry([tensor], source, to)[0]

    def backward(self, roots: Sequence[Tensor], *, at: int = 0, retain_graph: bool = False) -> None:
        """Backward from roots on one worker, until all are finished; every recv answers exactly once."""
        flying: list[Callable[[], None]] = []
        self.passes = []

        for worker in self.workers:
            self.passes.append(
                LocalBackward(
                    worker.sends, worker.recvs, worker.gradients, self._emitter(flying), retain_graph=retain_graph
                )
            )
        for rank in self.random.sample(range(len(self.workers)), len(self.workers)):
            self.passes[rank].engage(
                [(get_gradient_edge(root), torch.ones_like(root)) for root in roots] if rank == at else []
            )
        steps = [local.step for local in self.passes]
        while flying or steps:
            # Some messages are resolved before the next step is made, as when several have arrived meanwhile.
            for _ in range(self.random.randrange(len(flying) + 1)):
                flying.pop(self.random.randrange(len(flying)))()
            for step in self.random.sample(steps, len(steps)) if steps else [local.step for local in self.passes]:
                step()
            steps = []
        assert all(local.finished for local in self.passes)

    def _emitter(self, flying: list[Callable[[], None]]) -> Callable[[Recv, list[Tensor | None] | None], None]:
        answered: set[int] = set()

        def emit(recv: Recv, gradients: list[Tensor | None] | None) -> None:
            assert recv.message not in answered
            assert gradients is None or len(gradients) == recv.count
            answered.add(recv.message)
            copies = gradients and [None if gradient is None else gradient.detach().clone() for gradient in gradients]
            flying.append(lambda: self.passes[recv.rank].resolve(recv.message, copies))

        return emit


class OneProcess(LocalWorld):
    """The same programs with nobody else: ordinary autograd."""

    def carry(self, tensors: Sequence[Tensor], source: int, to: int) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]

    def backward(self, roots: Sequence[Tensor], *, at: int = 0, retain_graph: bool = False) -> None:
        torch.autograd.backward(list(roots), retain_graph=retain_graph)
