"""What join() changes in a negotiation: who need not ask, what they contribute, and how it ends. No messages."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp, identity
from hvlike.collectives.requests.reduction import row_by_row
from hvlike.collectives.requests.request import RequestKey, RequestSpec
from hvlike.errors import HorovodInternalError

JOIN_KEY: RequestKey = ("join", "join")
LEAVE_KEY: RequestKey = ("join", "leave")

PLANNED_KINDS = ("plan", "queue")  # Kinds that are agreed once and then go on without a message
EXCUSED_KINDS = ("allreduce", "barrier", *PLANNED_KINDS)  # What runs without the ranks that have joined


class JoinScope(enum.Enum):
    """What a rank that has joined stands in for."""

    EVERYTHING = "whatever the others do"
    PLANS = "what is planned; it asks for all else itself"


@dataclass(frozen=True, eq=False)
class JoinRequest:
    counts: Mapping[str, int]  # How many unnamed operations of each kind it has issued
    plans: frozenset[int]  # The planned reductions it takes part in, by their serial numbers
    spare_queues: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()  # What it could plan anew
    scope: JoinScope = JoinScope.EVERYTHING
    how: str = "called hvd.join()"  # For the errors of others; the same on all ranks, or they do not belong together


@dataclass(frozen=True)
class JoinEnd:
    last: int
    counts: Mapping[str, int]
    plans: frozenset[int]  # That all ranks took part in to the end: their queues can be used again
    spare_queues: frozenset[int] = frozenset()  # What was spare on every rank


@dataclass(frozen=True)
class JoinFailure:
    error: HorovodInternalError
    steps: Mapping[str, int]  # How many steps of each plan it has taken part in; those can be completed

    def misses(self, name: str, step: int) -> bool:
        return step > self.steps.get(name, 0)


@dataclass(frozen=True, eq=False)
class LeaveRequest:
    counts: Mapping[str, int]
    spare_queues: frozenset[int]
    failed: bool  # Steps may be half done: what was planned has to be forgotten everywhere


@dataclass(frozen=True)
class LeaveEnd:
    counts: Mapping[str, int]
    spare_queues: frozenset[int]
    failed: bool
    error: HorovodInternalError | None = None  # What the ranks raise that have not failed themselves

    @staticmethod
    def of(requests: Sequence[LeaveRequest]) -> LeaveEnd:
        spare = frozenset.intersection(*(each.spare_queues for each in requests))
        return LeaveEnd(merge_counts(each.counts for each in requests), spare, any(each.failed for each in requests))


@dataclass
class JoinState:
    requests: dict[int, JoinRequest] = field(default_factory=dict)
    # By position: plans made after a rank had joined, in which it takes part too, and the queues it has to spare.
    new_plans: dict[int, set[int]] = field(default_factory=dict)
    spare_queues: dict[int, set[int]] = field(default_factory=dict)

    def add(self, position: int, request: JoinRequest) -> None:
        self.requests[position] = request
        self.new_plans[position] = set()
        self.spare_queues[position] = set(request.spare_queues)

    def excused(self, kind: str) -> Collection[int]:
        if kind in PLANNED_KINDS:
            return self.requests.keys()
        return [position for position, each in self.requests.items() if each.scope is JoinScope.EVERYTHING]

    def knows(self, name: str) -> bool:
        return all(name in each.names for each in self.requests.values())

    def take_queue(self, number: int) -> int:
        """The queue `number` if it is spare on those that have joined, too; else -1. Once: later it is in use."""
        if not all(number in queues for queues in self.spare_queues.values()):
            return -1
        for queues in self.spare_queues.values():
            queues.remove(number)
        return number

    def planned(self, serial: int) -> None:
        for plans in self.new_plans.values():
            plans.add(serial)

    def end(self, ranks: Sequence[int]) -> JoinEnd:
        counts = merge_counts(each.counts for each in self.requests.values())
        plans = [request.plans | self.new_plans[position] for position, request in self.requests.items()]
        spare = frozenset.intersection(*(frozenset(queues) for queues in self.spare_queues.values()))
        return JoinEnd(ranks[list(self.requests)[-1]], counts, frozenset.intersection(*plans), spare)


def merge_counts(counts_of_all: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of unnamed operations from which all can go on alike."""
    merged: dict[str, int] = {}
    for counts in counts_of_all:
        merged |= {kind: max(merged.get(kind, 0), count) for kind, count in counts.items()}
    return merged


def why_not(spec: RequestSpec, *, known: bool = False) -> str | None:
    """Why a request cannot run while some ranks, which may have `known` it, have joined; None if it can."""
    if spec.kind not in EXCUSED_KINDS:
        return f"{spec.kind.capitalize()} is not supported with Join at this time"
    if spec.kind == "allreduce" and spec.op == ReduceOp.PRODUCT and spec.prescale != 1:
        return "op Product with a prescale_factor has no neutral contribution; scale the tensor before the call"
    if spec.kind == "plan" and spec.detail.portable is None and not known:
        return "The first step of an optimizer with such a compressor needs all ranks"
    if spec.kind == "queue" and not known:
        return "What begins here has to be made on all ranks"
    return None


def neutral_tensors(spec: RequestSpec) -> list[torch.Tensor]:
    op = ReduceOp(spec.op)
    if spec.prescale < 0 and op in (ReduceOp.MIN, ReduceOp.MAX):
        # The factor comes first and turns the order round.
        op = ReduceOp.MAX if op is ReduceOp.MIN else ReduceOp.MIN
    tensors = []
    for name, shape, strides in zip(spec.dtypes, spec.shapes, spec.strides, strict=True):
        dtype: torch.dtype = getattr(torch, name)
        value = 0 if spec.prescale == 0 else identity(op, dtype)
        tensors.append(torch.empty_strided(shape, strides or row_by_row(shape), dtype=dtype, device="cpu").fill_(value))
    return tensors
