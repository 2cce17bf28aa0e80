"""The jobs of a ZeroRedundancyOptimizer in its queue, on active ranks and on one that is absent (out of data).

    reduce    each rank gets the gradients of its share          (only where the optimizer owns the reduction)
    clip      the norm over all shares, and each rank scales its own
    update    each rank has stepped its share; the parameters go to all ranks

While all ranks are active nothing travels but the data and, with it, the count of active ranks. A rank that has just
become absent knows what is next: only one job can be. The count tells all ranks that one is absent. From then on each
job begins with an exchange of which ranks are active, and the highest of those sends what follows and what it needs:

    update    the options and, where others reduce, the gradients; absent ranks step their share, all are gathered
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from hvlike.backends.base import Backend
from hvlike.collectives.persistent.planned_queue import PlannedQueue
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.errors import HorovodInternalError
from hvlike.training.gradients.parameters import GroupOptions
from hvlike.training.zero.exchange import GradientReduction, ParameterExchange
from hvlike.training.zero.partition import Partition
from hvlike.training.zero.uneven_inputs import (
    CLIP,
    REDUCE,
    UPDATE,
    Clipping,
    StepCommand,
    broadcast_command,
    gather_active_ranks,
    send_gradients,
    total_norm,
)
from hvlike.transport.loop.coroutine import Coroutine

StepShare = Callable[[GroupOptions, dict[str, Any], Mapping[Tensor, Tensor | None]], None]
"""Updates the share of a rank with these options, keywords and gradients."""


class Steps:
    """The jobs of one rank."""

    def __init__(
        self,
        queue: PlannedQueue,
        partition: Partition,
        rank: int,
        exchange: ParameterExchange,
        reduction: GradientReduction | None,
        step_share: WeakMethod[StepShare],
    ) -> None:
        """Local.

        Args:
            queue: Runs the jobs; it keeps this object alive, not the reverse.
            partition: Who owns which parameters.
            rank: Position of this rank.
            exchange: Writes parameters to all ranks.
            reduction: Reduces gradients; None where others do.
            step_share: Updates the share of this rank while it is absent.
        """
        self.divides_by_active = False
        """Gradients are divided by the number of active ranks, not of all."""
        self.is_reduced = False
        """Gradients have been reduced and not been used yet."""
        self._queue = ref(queue)
        self._partition = partition
        self._rank = rank
        self._exchange = exchange
        self._reduction = reduction
        self._step_share = step_share
        self._own = [partition.parameters[place] for place in partition.owned(rank)]
        self._incomplete: int | None = None
        """The serial number of the queue in which a rank is known to be absent."""

    # On an active rank

    def reduce(self) -> int:
        """Reduce the gradients; return how many ranks were active. Collective; blocks."""
        active = self._run(self._reduce)
        self.is_reduced = True
        return active

    def clip(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of all ranks; return the norm before, 0-dim, float64. Collective; blocks."""
        clipping = Clipping(max_norm, norm_type, error_if_nonfinite)
        norms: list[Tensor] = []

        def job(backend: Backend) -> Coroutine[int]:
            present = yield from self._begin(backend, StepCommand(CLIP, clipping=clipping))
            norms.append((yield from self._clip(backend, clipping)))
            return present

        self._run(job)
        return norms[0]

    def update(self, options: GroupOptions, arguments: dict[str, Any]) -> int:
        """Give all ranks the parameters that each has updated; return how many were active. Collective; blocks.

        An absent rank updates its share with these options and arguments.
        """
        active = self._run(lambda backend: self._update(backend, options, arguments))
        self.is_reduced = False
        return active

    def _run(self, job: CountingJob) -> int:
        queue = self._queue()
        assert queue is not None
        return queue.run(job)

    # On an absent rank

    def stand_in(self) -> CountingJob:
        """Return the job of an absent rank."""
        return self._follow

    def _follow(self, backend: Backend) -> Coroutine[int]:
        if not self._knows_absence:
            return (yield from self._follow_first(backend))
        present, command = yield from self._exchange_command(backend, None)
        if command is None:
            return 0
        if command.kind == REDUCE and self._reduction is not None:
            yield from self._reduction.run(backend, active=False)
            self._divide(len(present))
        elif command.kind == CLIP:
            yield from self._clip(backend, command.clipping)
        else:
            yield from self._catch_up(backend, present, command)
        return len(present)

    def _follow_first(self, backend: Backend) -> Coroutine[int]:
        """Take part in the first job after this rank has become absent, which the others begin without a command."""
        if self._reduction is not None and not self.is_reduced:
            work = self._reduction.run(backend, active=False)
            present = yield from self._counted(backend, work, active=False)
            self._divide(present)
            return present
        present = yield from self._counted(backend, self._exchange.run(backend), active=False)
        self.is_reduced = False
        if present:
            there, command = yield from self._exchange_command(backend, None)
            if command is not None:
                yield from self._catch_up(backend, there, command)
        return present

    # The jobs

    def _reduce(self, backend: Backend) -> Coroutine[int]:
        assert self._reduction is not None
        work = self._reduction.run(backend, active=True)
        if self._knows_absence:
            present = yield from self._begin(backend, StepCommand(REDUCE))
            yield from work
        else:
            present = yield from self._counted(backend, work, active=True)
        self._divide(present)
        return present

    def _update(self, backend: Backend, options: GroupOptions, arguments: dict[str, Any]) -> Coroutine[int]:
        if not self._knows_absence:
            present = yield from self._counted(backend, self._exchange.run(backend), active=True)
            if present == self._partition.ranks:
                return present
        places = frozenset(place for place, each in enumerate(self._partition.parameters) if each.grad is None)
        there, command = yield from self._exchange_command(backend, StepCommand(UPDATE, options, arguments, places))
        if command is not None:
            yield from self._catch_up(backend, there, command)
        return len(there)

    def _catch_up(self, backend: Backend, present: Sequence[int], command: StepCommand) -> Coroutine[None]:
        """Absent ranks update their shares, and all parameters are gathered."""
        is_absent = self._rank not in present
        if self._reduction is None:
            shares: list[list[Tensor]] = [
                []
                if rank in present
                else [
                    self._partition.parameters[place]
                    for place in self._partition.owned(rank)
                    if place not in command.without_gradient
                ]
                for rank in range(self._partition.ranks)
            ]
            received = yield from send_gradients(backend, present[-1], self._rank, shares)
            gradients = [received.get(parameter) for parameter in self._own]
        else:
            gradients = [parameter.grad for parameter in self._own]
        if is_absent:
            step_share = self._step_share()
            if step_share is None:
                raise HorovodInternalError(
                    "ZeroRedundancyOptimizer: other ranks make steps of an optimizer that this rank has dropped. Keep "
                    "it on every rank while any uses it."
                )
            step_share(command.options, command.arguments, dict(zip(self._own, gradients, strict=True)))
        yield from self._exchange.run(backend)

    def _clip(self, backend: Backend, clipping: Clipping) -> Coroutine[Tensor]:
        gradients = [each.grad.detach() for each in self._own if each.grad is not None]
        norm = yield from total_norm(backend, self._partition.ranks, gradients, clipping.norm_type)
        # Applied in any case: on a GPU a test would wait for the device.
        factor = (clipping.max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients and (not clipping.error_if_nonfinite or bool(norm.isfinite())):
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        return norm

    # Which ranks are active

    @property
    def _knows_absence(self) -> bool:
        """All ranks know that one is absent. In a queue that was opened anew none is known to be."""
        return self._incomplete is not None and self._incomplete == self._serial

    @property
    def _serial(self) -> int | None:
        queue = self._queue()
        return None if queue is None else queue.serial

    def _counted(self, backend: Backend, work: Coroutine[None], *, active: bool) -> Coroutine[int]:
        """Do the work and note whether a rank is absent; return the number of active ranks."""
        yield from work
        present = yield from backend.count_active(active)
        if 0 < present < self._partition.ranks:
            self._incomplete = self._serial
        return present

    def _begin(self, backend: Backend, command: StepCommand) -> Coroutine[int]:
        """Begin a job that absent ranks run too; return the number of active ranks."""
        if not self._knows_absence:
            return (yield from backend.count_active(True))
        there, _ = yield from self._exchange_command(backend, command)
        return len(there)

    def _exchange_command(
        self, backend: Backend, command: StepCommand | None
    ) -> Coroutine[tuple[list[int], StepCommand | None]]:
        """Return the active ranks and the command of the highest; `command` is this rank's, None if it is absent."""
        there = yield from gather_active_ranks(backend, self._rank, self._partition.ranks, active=command is not None)
        if not there:
            self._incomplete = None
            self.is_reduced = False
            return there, None
        return there, (yield from broadcast_command(backend, there[-1], self._rank, command))

    def _divide(self, present: int) -> None:
        if self.divides_by_active and 0 < present < self._partition.ranks:
            gradients = [each.grad.detach() for each in self._own if each.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, self._partition.ranks / present)
