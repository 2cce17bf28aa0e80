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

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from hvlike.backends.base import FAILED, INCOMPLETE, Backend, active_ranks
from hvlike.backends.cuda.device_backend import home_of
from hvlike.collectives.api.objects import describe_error
from hvlike.collectives.requests.reduction import Max, Sum, arithmetic_of
from hvlike.collectives.session.joined_proxy import CountingJob
from hvlike.errors import HorovodInternalError
from hvlike.training.gradients.grad_state import declared_dtype
from hvlike.training.gradients.parameters import GroupOptions
from hvlike.training.gradients.planned_queue import PlannedQueue, send_bytes
from hvlike.training.zero.exchange import GradientReduction, ParameterExchange, Partition
from hvlike.transport.loop.coroutine import Coroutine

REDUCE, CLIP, UPDATE = "reduce", "clip", "update"


class StepCommand(NamedTuple):
    """What comes next, from the highest active rank."""

    kind: str
    arguments: dict[str, Any]  # Keywords of the wrapped step(), or of `_clip`
    options: GroupOptions
    without_gradient: frozenset[int] = frozenset()  # Indices of parameters


StepShare = Callable[[GroupOptions, dict[str, Any], Mapping[Tensor, Tensor | None]], None]


class ShardedSteps:
    def __init__(
        self,
        queue: PlannedQueue,
        partition: Partition,
        rank: int,
        exchange: ParameterExchange,
        reduction: GradientReduction | None,
        step_share: WeakMethod[StepShare],
    ) -> None:
        """The queue runs the jobs, and keeps this object alive. `step_share` is for while this rank is absent."""
        self.divides_by_active = False  # Gradients are divided by the number of active ranks, not of all
        self.is_reduced = False  # Gradients have been reduced and not been used yet
        self._queue = ref(queue)
        self._partition = partition
        self._rank = rank
        self._exchange = exchange
        self._reduction = reduction
        self._step_share = step_share
        self._own = [partition.parameters[place] for place in partition.owned(rank)]
        self._norm = torch.empty(0, device="cpu")
        self._own_failure: str | None = None  # Why this rank could not update its share
        self.failure: str | None = None  # The same of the last update, of any rank
        self._incomplete: int | None = None  # The serial number of the queue in which a rank is known to be absent

    # On an active rank: collective; blocks

    def reduce(self) -> None:
        self._run(StepCommand(REDUCE, {}, []))
        self.is_reduced = True

    def clip(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of all ranks; return the norm before, 0-dim, float64."""
        arguments = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        self._run(StepCommand(CLIP, arguments, []))
        return self._norm

    def update(self, options: GroupOptions, arguments: dict[str, Any], failure: Exception | None = None) -> int:
        """Give all ranks the shares. `failure`: of this rank's step; `self.failure` tells all ranks then."""
        self._own_failure = None if failure is None else describe_error(failure)
        self.failure = None
        try:
            return self._run(StepCommand(UPDATE, arguments, options))
        finally:
            self.is_reduced = False
            self._own_failure = None

    def _run(self, command: StepCommand) -> int:
        queue = self._queue()
        assert queue is not None
        return queue.run(lambda backend: self._job(backend, command))

    def stand_in(self) -> CountingJob:
        return lambda backend: self._job(backend, None)

    # The jobs

    def _job(self, backend: Backend, command: StepCommand | None) -> Coroutine[int]:
        """Run a job of this rank's program or, on an absent rank (None), of the others; return how many are active."""
        if self._incomplete is not None and self._incomplete == self._serial:
            # All ranks know that one is absent. In a queue that was opened anew none is known to be.
            return (yield from self._run_as_told(backend, command))
        if command is not None and command.kind == CLIP:
            # It follows a reduction: a rank that was absent then would be known.
            yield from self._clip(backend, **command.arguments)
            return self._partition.ranks
        return (yield from self._run_counting(backend, command))

    def _run_as_told(self, backend: Backend, command: StepCommand | None) -> Coroutine[int]:
        """Run a job where some rank is absent: the highest active one says what comes next."""
        active = command is not None
        there, command = yield from self._exchange_command(backend, command)
        if command is None:
            return 0
        if command.kind == CLIP:
            yield from self._clip(backend, **command.arguments)
        elif command.kind == UPDATE:
            yield from self._catch_up(backend, there, command)
        elif self._reduction is not None:
            yield from self._reduction.run(backend, active=active, incomplete=True)
            self._leave_out_absent(len(there))
        return len(there)

    def _run_counting(self, backend: Backend, command: StepCommand | None) -> Coroutine[int]:
        """Run a job where all ranks may be active, and count them; an absent one knows which job it can only be."""
        active = command is not None
        kind = UPDATE if self._reduction is None else REDUCE
        if command is not None:
            kind = command.kind
        reduction = self._reduction if kind == REDUCE else None
        lacks = active and reduction is not None and reduction.is_incomplete
        # First, so that a rank that fails in its work has been counted: the others end their step.
        failed = FAILED * (self._own_failure is not None)
        count = yield from backend.count_active(active + INCOMPLETE * lacks + failed)
        present = active_ranks(count)
        if not present:
            # The end of a Join context: gradients that a program holds meanwhile stay.
            return 0
        if reduction is not None:
            yield from reduction.run(backend, active=active, incomplete=count >= INCOMPLETE)
        else:
            yield from self._exchange.run(backend)
        if present < self._partition.ranks:
            # The first job after a rank has become absent.
            self._incomplete = self._serial
            if reduction is not None:
                self._leave_out_absent(present)
            else:
                there, command = yield from self._exchange_command(backend, command)
                if command is not None:
                    yield from self._catch_up(backend, there, command)
        elif count >= FAILED:
            yield from self._tell_failure(backend)
        return present

    def _leave_out_absent(self, present: int) -> None:
        """Make averages over all ranks, in which absent ones count as zeros, averages over the others, if so asked."""
        size = self._partition.ranks
        if self.divides_by_active and present < size:
            gradients = [parameter.grad.detach() for parameter in self._own if parameter.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, size / present)

    def _catch_up(self, backend: Backend, present: Sequence[int], command: StepCommand) -> Coroutine[None]:
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
            gradients = {parameter: received.get(parameter) for parameter in self._own}
        else:
            gradients = {parameter: parameter.grad for parameter in self._own}
        absent = self._rank not in present
        if absent:
            step_share = self._step_share()
            if step_share is None:
                raise HorovodInternalError(
                    "ZeroRedundancyOptimizer: other ranks make steps of an optimizer that this rank has dropped. Keep "
                    "it on every rank while any uses it."
                )
            step_share(command.options, command.arguments, gradients)
        yield from self._exchange.run(backend, gradients if absent else None)

    def _clip(
        self, backend: Backend, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Coroutine[None]:
        gradients = [each.grad.detach() for each in self._own if each.grad is not None]
        norm = yield from total_norm(backend, self._partition.ranks, gradients, norm_type)
        # Applied in any case: on a GPU a test would wait for the device.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients and (not error_if_nonfinite or bool(norm.isfinite())):
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        self._norm = norm

    @property
    def _serial(self) -> int | None:
        queue = self._queue()
        return None if queue is None else queue.serial

    def _exchange_command(
        self, backend: Backend, command: StepCommand | None
    ) -> Coroutine[tuple[list[int], StepCommand | None]]:
        """Return the active ranks and the command of the highest; `command` is this rank's, None if it is absent."""
        flags = torch.zeros(self._partition.ranks, dtype=torch.int32, device="cpu")
        flags[self._rank] = int(command is not None) + (self._own_failure is not None)
        yield from backend.allreduce([flags], arithmetic_of(torch.int32, Sum, len(flags), 1.0, 1.0))
        if (flags > 1).any():
            yield from self._tell_failure(backend)
        there = flags.nonzero().view(-1).tolist()
        if not there:
            self._incomplete = None
            self.is_reduced = False
            return there, None
        data = b""
        leader = there[-1]
        if command is not None and self._rank == leader:
            nothing = (place for place, each in enumerate(self._partition.parameters) if each.grad is None)
            data = _pickled(command._replace(without_gradient=frozenset(nothing)), leader)
        told: StepCommand | str = pickle.loads((yield from send_bytes(backend, data, leader)))
        if isinstance(told, str):
            raise HorovodInternalError(told)
        return there, told

    def _tell_failure(self, backend: Backend) -> Coroutine[None]:
        """Some rank could not update its share: all learn which, the highest of them, and why."""
        own = self._own_failure
        highest = torch.tensor([-1 if own is None else self._rank], dtype=torch.int32, device="cpu")
        yield from backend.allreduce([highest], arithmetic_of(torch.int32, Max, self._partition.ranks, 1.0, 1.0))
        source, queue = int(highest), self._queue()
        why = yield from send_bytes(backend, (own or "").encode(errors="replace"), source)
        number = source if queue is None else queue.group.ranks[source]
        self.failure = (
            f"ZeroRedundancyOptimizer: rank {number} could not update its share of the parameters "
            f"({bytes(why).decode(errors='replace')}). All ranks have the same parameters: that share is as the rank "
            "has left it, the others are updated."
        )


def _pickled(command: StepCommand, leader: int) -> bytes:
    """What the leader sends: the command or, where that does not pickle, the text of the error for all ranks."""
    try:
        return pickle.dumps(command, protocol=5)
    except Exception as error:  # __reduce__ of any class may raise anything
        text = (
            f"ZeroRedundancyOptimizer: a rank is out of data, and the options of the parameter groups or the arguments "
            f"of step() cannot be sent to it by member {leader} of the ranks: they do not pickle "
            f"({describe_error(error)})."
        )
        return pickle.dumps(text, protocol=5)


def send_gradients(
    backend: Backend, leader: int, rank: int, shares: Sequence[Sequence[Tensor]]
) -> Coroutine[dict[Tensor, Tensor]]:
    """Send the leader's gradients to the absent ranks, `shares` of them; return those that came, by parameter."""
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    sends = [_flat_gradients(share) if rank == leader and share else nothing for share in shares]
    receives = [nothing] * len(shares)
    mine = shares[rank]
    dtypes = [declared_dtype(parameter) for parameter in mine]
    sizes = [parameter.numel() * dtype.itemsize for parameter, dtype in zip(mine, dtypes, strict=True)]
    if mine:
        receives[leader] = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    yield from backend.alltoall(sends, receives)
    # Copies: the parts of the flat tensor may not be aligned for their dtype.
    return {
        parameter: part.clone().view(dtype).view(parameter.shape).to(parameter.device)
        for parameter, dtype, part in zip(
            mine, dtypes, torch.split(receives[leader], sizes) if mine else (), strict=True
        )
    }


def _flat_gradients(parameters: Sequence[Tensor]) -> Tensor:
    flats = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            plain = dense.to("cpu", declared_dtype(parameter)).resolve_conj().resolve_neg()
            flats.append(plain.contiguous().view(-1).view(torch.uint8))
    return torch.cat(flats)


def total_norm(backend: Backend, size: int, gradients: Sequence[Tensor], norm_type: float) -> Coroutine[Tensor]:
    """Return the norm over the gradients of all ranks, each of which passes those it owns; 0-dim, float64."""
    home = home_of(backend) or torch.device("cpu")
    norms = [torch.linalg.vector_norm(gradient.detach(), norm_type).to(home, torch.float64) for gradient in gradients]
    own = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), dtype=torch.float64, device=home)]), norm_type)
    largest = norm_type == float("inf")
    part = (own if largest else own**norm_type).reshape(1)
    yield from backend.allreduce([part], arithmetic_of(torch.float64, Max if largest else Sum, size, 1.0, 1.0))
    norm: Tensor = part[0] if largest else part[0].pow(1.0 / norm_type)
    return norm
