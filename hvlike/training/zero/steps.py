"""What the ranks do on the lane of a ZeroRedundancyOptimizer, and what one does that is absent.

    reduce    each rank gets the gradients of its share          (only where the optimizer owns the reduction)
    clip      the norm over all shares, and each rank scales its own
    update    each rank has stepped its share; the parameters go to all ranks

While all ranks are active nothing travels but the data and, with it, the count of active ranks. An absent rank guesses
what is next: there is only one thing it can be. The count tells all ranks that one is absent; from then on each job
begins with the question which ranks are active, and the highest of those says what follows and what is needed for it:

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
from hvlike.training.zero.exchange import GradientReduction, ParameterExchange
from hvlike.training.zero.partition import GroupOptions, Partition
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
    """The jobs of one rank; see the head of this file."""

    def __init__(
        self,
        lane: PlannedQueue,
        shares: Partition,
        rank: int,
        exchange: ParameterExchange,
        reduction: GradientReduction | None,
        step_share: WeakMethod[StepShare],
    ) -> None:
        """lane: has `stand_in` of this object, and keeps it alive; not the reverse.

        step_share: lets this rank update its share while it is absent.
        """
        self.divides_by_active = False
        """Gradients are divided by the number of active ranks, not of all."""
        self.is_reduced = False
        """Gradients have been reduced and not been used yet."""
        self._lane = ref(lane)
        self._shares = shares
        self._rank = rank
        self._exchange = exchange
        self._reduction = reduction
        self._step_share = step_share
        self._own = [shares.parameters[place] for place in shares.owned(rank)]
        self._incomplete: int | None = None
        """The serial number of the lane on which a rank is known to be absent."""

    # What an active rank does

    def reduce(self) -> int:
        """Reduce the gradients. Collective; blocks; how many ranks were active."""
        active = self._run(self._reduce)
        self.is_reduced = True
        return active

    def clip(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of all shares; the norm before, 0-dim, float64. Collective; blocks."""
        clipping = Clipping(max_norm, norm_type, error_if_nonfinite)
        norms: list[Tensor] = []

        def job(plane: Backend) -> Coroutine[int]:
            present = yield from self._begin(plane, StepCommand(CLIP, clipping=clipping))
            norms.append((yield from self._clip(plane, clipping)))
            return present

        self._run(job)
        return norms[0]

    def update(self, options: GroupOptions, arguments: dict[str, Any]) -> int:
        """Give all ranks the parameters that each has updated. Collective; blocks; how many ranks were active.

        options, arguments: what an absent rank updates its share with.
        """
        active = self._run(lambda plane: self._update(plane, options, arguments))
        self.is_reduced = False
        return active

    def _run(self, job: CountingJob) -> int:
        lane = self._lane()
        assert lane is not None
        return lane.run(job)

    # What one does that is absent

    def stand_in(self) -> CountingJob:
        """The job of an absent rank: do what the others need, whatever it is."""
        return self._follow

    def _follow(self, plane: Backend) -> Coroutine[int]:
        if not self._knows_of_absence:
            return (yield from self._guess(plane))
        present, command = yield from self._ask(plane, None)
        if command is None:
            return 0
        if command.kind == REDUCE and self._reduction is not None:
            yield from self._reduction.run(plane, active=False)
            self._divide(len(present))
        elif command.kind == CLIP:
            yield from self._clip(plane, command.clipping)
        else:
            yield from self._catch_up(plane, present, command)
        return len(present)

    def _guess(self, plane: Backend) -> Coroutine[int]:
        """All were there so far: what comes next without a word."""
        plane.begin_count(active=False)
        if self._reduction is not None and not self.is_reduced:
            yield from self._reduction.run(plane, active=False)
            present = yield from plane.end_count()
            self._note(present)
            self._divide(present)
            return present
        yield from self._exchange.run(plane)
        present = yield from plane.end_count()
        self.is_reduced = False
        self._note(present)
        if present:
            there, command = yield from self._ask(plane, None)
            if command is not None:
                yield from self._catch_up(plane, there, command)
        return present

    # The jobs

    def _reduce(self, plane: Backend) -> Coroutine[int]:
        assert self._reduction is not None
        if self._knows_of_absence:
            present = yield from self._begin(plane, StepCommand(REDUCE))
            yield from self._reduction.run(plane, active=True)
        else:
            plane.begin_count(active=True)
            yield from self._reduction.run(plane, active=True)
            present = yield from plane.end_count()
            self._note(present)
        self._divide(present)
        return present

    def _update(self, plane: Backend, options: GroupOptions, arguments: dict[str, Any]) -> Coroutine[int]:
        if not self._knows_of_absence:
            plane.begin_count(active=True)
            yield from self._exchange.run(plane)
            present = yield from plane.end_count()
            self._note(present)
            if present == self._shares.ranks:
                return present
        places = frozenset(place for place, each in enumerate(self._shares.parameters) if each.grad is None)
        there, command = yield from self._ask(plane, StepCommand(UPDATE, options, arguments, places))
        if command is not None:
            yield from self._catch_up(plane, there, command)
        return len(there)

    def _catch_up(self, plane: Backend, present: Sequence[int], command: StepCommand) -> Coroutine[None]:
        """Absent ranks update their shares, and all parameters are gathered."""
        is_absent = self._rank not in present
        if self._reduction is None:
            shares: list[list[Tensor]] = [
                []
                if rank in present
                else [
                    self._shares.parameters[place]
                    for place in self._shares.owned(rank)
                    if place not in command.without_gradient
                ]
                for rank in range(self._shares.ranks)
            ]
            received = yield from send_gradients(plane, present[-1], self._rank, shares)
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
        yield from self._exchange.run(plane)

    def _clip(self, plane: Backend, clipping: Clipping) -> Coroutine[Tensor]:
        gradients = [each.grad.detach() for each in self._own if each.grad is not None]
        norm = yield from total_norm(plane, self._shares.ranks, gradients, clipping.norm_type)
        # Not asked whether there is anything to clip: on a GPU the answer would have to be waited for.
        factor = (clipping.max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients and (not clipping.error_if_nonfinite or bool(norm.isfinite())):
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        return norm

    # Who is there

    @property
    def _knows_of_absence(self) -> bool:
        """All ranks know that one is absent. A lane that was opened anew begins without."""
        return self._incomplete is not None and self._incomplete == self._serial

    @property
    def _serial(self) -> int | None:
        lane = self._lane()
        return None if lane is None else lane.serial

    def _note(self, present: int) -> None:
        if 0 < present < self._shares.ranks:
            self._incomplete = self._serial

    def _begin(self, plane: Backend, command: StepCommand) -> Coroutine[int]:
        """Begin a job that is the same on absent ranks once they know of it."""
        if not self._knows_of_absence:
            plane.begin_count(active=True)
            return (yield from plane.end_count())
        there, _ = yield from self._ask(plane, command)
        return len(there)

    def _ask(self, plane: Backend, command: StepCommand | None) -> Coroutine[tuple[list[int], StepCommand | None]]:
        """Who is there, and what the highest of them says; `command`: what this rank would, None: it is absent."""
        there = yield from gather_active_ranks(plane, self._rank, self._shares.ranks, active=command is not None)
        if not there:
            self._incomplete = None
            self.is_reduced = False
            return there, None
        return there, (yield from broadcast_command(plane, there[-1], self._rank, command))

    def _divide(self, present: int) -> None:
        if self.divides_by_active and 0 < present < self._shares.ranks:
            gradients = [each.grad.detach() for each in self._own if each.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, self._shares.ranks / present)
