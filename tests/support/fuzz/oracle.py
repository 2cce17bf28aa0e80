"""The oracle: one process in which simulated ranks, a thread each, train by plain torch and exchange by a list.

It knows of hvlike only what the pages promise: what is reduced when, and which mistakes are an error.
"""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from support.fuzz.documented import DocumentedError
from support.fuzz.models import SyncNorm, make_network
from support.fuzz.outcomes import Outcome
from support.fuzz.programs import Program
from support.fuzz.reference import ReferenceModule, ReferenceOptimizer, UpdatedInBackward, combined
from support.fuzz.reference_norm import ReferenceSyncNorm
from support.fuzz.training import Training, is_lazy, make_optimizer, start_differently
from torch import Tensor

PATIENCE_SECONDS = 60.0


class Unsound(Exception):
    """A program of which nobody can say how it ends."""


class Absent(Unsound):
    """A rank waits for one that has left."""


class Exchange:
    """Gives every simulated rank of a set what all of them have brought.

    A rank is told that another does not come exactly where that has left before: else threads would decide.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # By the ranks of a set and the number of their exchange: what each has brought.
        self._brought: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def gather(self, rank: int, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Wait for all of the ranks, and return what each has brought.

        Raises:
            Absent: one of them has left without it, or has not come for long.
        """
        together = tuple(ranks)
        with self._changed:
            number = self._numbers[together, rank] = self._numbers.get((together, rank), 0) + 1
            brought = self._brought.setdefault((together, number), {})
            brought[rank] = value
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: brought.keys() >= set(ranks) or (self._left - brought.keys()) & set(ranks), PATIENCE_SECONDS
            )
            if not brought.keys() >= set(ranks):
                raise Absent
            return [brought[each] for each in ranks]

    def leave(self, rank: int) -> None:
        """Let no rank wait for this one any more."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


# Pickled optimizers find their world again.
_worlds: weakref.WeakValueDictionary[int, SimulatedWorld] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _world_of(number: int) -> SimulatedWorld:
    return _worlds[number]


class SimulatedWorld:
    """One simulated rank."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank, self.size = rank, exchange.size
        self.exchange = exchange
        self.number = next(_numbers)
        _worlds[self.number] = self

    def __deepcopy__(self, memo: object) -> SimulatedWorld:
        return self

    def __reduce__(self) -> tuple[Callable[[int], SimulatedWorld], tuple[int]]:
        return _world_of, (self.number,)

    def gather(self, value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return what all ranks, or these, have brought."""
        return self.exchange.gather(self.rank, value, range(self.size) if ranks is None else ranks)

    def wrap(self, training: Training) -> None:
        """As HvlikeWorld.wrap, by the reference classes."""
        program, network = training.program, training.network
        for part in network.parts:
            if isinstance(part, SyncNorm):
                part.layer = ReferenceSyncNorm(part.layer, self)
        start = program.given.get("start")
        if start:
            start_differently(network, self.rank)
        if start == "broadcast":
            self._broadcast(list(network.state_dict().values()))
        self.rewrap(training)

    def rewrap(self, training: Training) -> None:
        """Make the reference classes."""
        program, network = training.program, training.network
        if program.kind in ("optimizer", "zero alone"):
            training.optimizer = ReferenceOptimizer(
                make_optimizer(program.optimizer, network.parameters()), self, program, training.ranks
            )
            return
        inner = make_optimizer(program.optimizer, network.parameters())
        training.optimizer = UpdatedInBackward(inner) if "in_backward" in program.given else inner
        if program.kind == "zero" and self.rank not in training.ranks:
            training.optimizer = inner
        training.model = ReferenceModule(network, self, program, training.ranks)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        dense = [each for each in tensors if each.layout is torch.strided and not is_lazy(each)]
        first = self.gather([each.detach().clone() for each in dense])[0]
        with torch.no_grad():
            for each, value in zip(dense, first, strict=True):
                each.copy_(value)

    def backward(self, training: Training, loss: Tensor, *, reduces: bool, **options: bool) -> None:
        """Run a backward pass, then what follows from it."""
        parameters = list(training.network.parameters())
        before = [(each.grad, None if each.grad is None else each.grad._version) for each in parameters]
        failure: Exception | None = None
        try:
            loss.backward(**options)
        except Exception as error:
            failure = error
        reached = {
            each
            for each, (gradient, version) in zip(parameters, before, strict=True)
            if each.grad is not None and (each.grad is not gradient or each.grad._version != version)
        }
        keeps_nodes = training.program.kind == "optimizer" or self.rank in training.ranks
        if reached & training.resized and keeps_nodes and training.program.kind != "zero alone":
            # The program drops what has arrived.
            failure, reached = DocumentedError("resized parameter"), set()
        if failure is not None:
            if isinstance(training.model, ReferenceModule):
                training.model.interrupted |= reduces
                training.model.reached |= reached
            raise failure
        for each in (training.model, training.optimizer):
            if isinstance(each, (ReferenceModule, ReferenceOptimizer)):
                each.after_backward(reached, reduces=reduces)
        if reduces and reached and isinstance(training.optimizer, UpdatedInBackward):
            training.optimizer.update()

    def no_sync(self, training: Training) -> AbstractContextManager[None]:
        """Return the context of local passes."""
        wrapper = training.model if isinstance(training.model, ReferenceModule) else training.optimizer
        return wrapper.no_sync()

    def uneven(
        self, training: Training, counts: Sequence[int], step: Callable[[int], None], *, by_active: bool
    ) -> None:
        """Stand in where this rank has no inputs; then take over what the highest that missed none has."""
        wrapper = training.model if isinstance(training.model, ReferenceModule) else training.optimizer
        for number in range(max(counts)):
            present = [rank for rank, count in enumerate(counts) if count > number]
            wrapper.present = present
            wrapper.divisor = len(present) if by_active else self.size
            if self.rank in present:
                step(number)
            else:
                wrapper.stand_in()
        wrapper.present, wrapper.divisor = None, self.size
        authority = max(rank for rank, count in enumerate(counts) if count == max(counts))
        if training.program.kind == "ddp" and not any(each.requires_grad for each in training.network.parameters()):
            authority = self.size - 1  # Nothing was reduced: no rank has missed anything
        self._take_over(training, authority)

    def _take_over(self, training: Training, authority: int) -> None:
        buffers = isinstance(training.model, ReferenceModule) and training.model.sends_buffers
        values = [*training.network.parameters(), *(training.network.buffers() if buffers else ())]
        everybody = self.gather(([each.detach().clone() for each in values], self._state_now(training)))
        theirs, state = everybody[authority]
        with torch.no_grad():
            for each, value in zip(values, theirs, strict=True):
                each.copy_(value)
        if training.program.kind != "ddp" and training.program.given.get("op") != "adasum":
            self._load(training, state)
        if isinstance(training.model, ReferenceModule):
            training.model.buffers_are_due = True

    def _state_now(self, training: Training) -> dict[str, Any]:
        """Copy the optimizer's state: others look at it while this rank goes on."""
        state: dict[str, Any] = copy.deepcopy(training.optimizer.state_dict())
        return state

    def _load(self, training: Training, state: dict[str, Any]) -> None:
        """Take over options and state as they are: load_state_dict() casts to the dtype of the parameters."""
        inner = self.for_scheduler(training)
        inner.load_state_dict(copy.deepcopy(state))
        parameters = [each for group in inner.param_groups for each in group["params"]]
        for place, kept in copy.deepcopy(state["state"]).items():
            inner.state[parameters[place]] = kept

    def resume(self, training: Training, ranks: Sequence[int]) -> None:
        """Take over the state of the first rank, wrap anew, load."""
        values = [each for each in training.network.state_dict().values() if each.layout is torch.strided]
        everybody = self.gather(([each.detach().clone() for each in values], self._state_now(training)))
        theirs, state = copy.deepcopy(everybody[training.ranks[0]])
        with torch.no_grad():
            for each, value in zip(values, theirs, strict=True):
                each.copy_(value)
        training.ranks, training.model = ranks, training.network
        self.rewrap(training)
        training.optimizer.load_state_dict(state)

    def average(self, tensors: list[Tensor]) -> None:
        """Average by hand."""
        everybody = self.gather([each.detach().clone() for each in tensors])
        for place, tensor in enumerate(tensors):
            average = combined([each[place] for each in everybody], "average", self.size)
            assert average is not None
            tensor.copy_(average)

    def clip(self, training: Training, norm: float) -> None:
        """Clip reduced gradients."""
        if isinstance(training.optimizer, ReferenceOptimizer):
            training.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(training.network.parameters(), norm)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave it as it is."""
        return function

    def about_to_step(self, training: Training) -> None:
        """A step on sums that no pass has reduced makes ranks part in any library."""
        if isinstance(training.model, ReferenceModule) and training.model.reached:
            raise Unsound

    def for_scaler(self, training: Training) -> Any:
        """Return what a GradScaler is given."""
        if isinstance(training.optimizer, ReferenceOptimizer):
            return training.optimizer.for_scaler()
        return training.optimizer

    def for_scheduler(self, training: Training) -> Any:
        """Return what a schedule is given."""
        return getattr(training.optimizer, "inner", training.optimizer)

    def state(self, training: Training) -> dict[int, dict[str, Any]]:
        """Return that of the plain optimizer."""
        found: dict[int, dict[str, Any]] = self.for_scheduler(training).state_dict()["state"]
        return found


def simulate(program: Program, ranks: int, pool: ThreadPoolExecutor) -> list[Outcome]:
    """Run a program on simulated ranks."""
    exchange = Exchange(ranks)
    networks = [make_network(program.parts) for _ in range(ranks)]

    def run(rank: int) -> Outcome:
        training = Training(SimulatedWorld(rank, exchange), program, networks[rank])
        outcome = training.run()
        if outcome.failure is not None:
            exchange.leave(rank)
        return outcome

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(pool.map(run, range(ranks)))
