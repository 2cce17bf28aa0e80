"""Which ranks have asked for what: the coordinator's table, and that of the leader of a node. No messages.

A request runs when every member has asked for it with the same spec. If the specs differ, it fails on every rank with
an error that names the ranks and both values.

Where a process set spans several nodes, the first member of each is its leader: the others speak to the coordinator
through it and hear from it, so what the coordinator takes and sends grows with the nodes and not with the ranks.

    asked for by all members of the node    goes on at once, as one entry where they ask for the same
    asked for by some                       with the next health check, or before a report of one of them, so that
                                            whoever looks for missing ranks knows of it
    anything while a member has joined      at once: nothing waits for those that have joined
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvlike.backends.arithmetic.reduce_op import ReduceOp, op_name
from hvlike.collectives.requests.join_protocol import JOIN_KEY, LEAVE_KEY, PLANNED_KINDS, JoinState, LeaveEnd, why_not
from hvlike.collectives.requests.plan import (
    find_plan_mismatch,
    find_queue_mismatch,
    merge_proposals,
    merge_queue_proposals,
)
from hvlike.collectives.requests.request import RequestKey, RequestSpec
from hvlike.errors import HorovodInternalError, MismatchError, ShapeMismatchError


@dataclass
class Response:
    """The decision on one request, the same on all members: run it with `extra`, or fail with `error`."""

    key: RequestKey
    spec: RequestSpec
    extra: Any = None
    error: HorovodInternalError | None = None
    uniform: bool = True  # Every rank sent the very same spec
    last: int = -1  # The rank that asked last; -1: it was not decided by anyone's asking
    number: int | None = None  # All members use it in place of the spec from then on


@dataclass
class MessageTable:
    ranks: tuple[int, ...]
    pending: dict[RequestKey, dict[int, RequestSpec]] = field(default_factory=dict)
    since: dict[RequestKey, float] = field(default_factory=dict)  # When each was asked for first
    joins: JoinState = field(default_factory=JoinState)
    plans: int = 0  # How many plans were agreed: their serial numbers

    @property
    def joined(self) -> Collection[int]:
        return self.joins.excused("")

    @property
    def away(self) -> Collection[int]:
        """The positions of the members that others stand in for in what is planned."""
        return self.joins.requests.keys()

    def excused(self, key: RequestKey) -> Collection[int]:
        """The positions of the members that need not ask for `key`."""
        return () if key in (JOIN_KEY, LEAVE_KEY) else self.joins.excused(key[0])

    def submit(self, position: int, key: RequestKey, spec: RequestSpec, now: float = 0.0) -> Response | None:
        asked = self.pending.setdefault(key, {})
        asked[position] = spec
        self.since.setdefault(key, now)
        return self._decide(key)

    def join(self, position: int, spec: RequestSpec, now: float = 0.0) -> list[Response]:
        """The member at `position` joins; the responses on everything that lacked only it."""
        self.joins.add(position, spec.detail)
        responses = [self._decide(key) for key in list(self.pending) if key != JOIN_KEY]
        responses.append(self.submit(position, JOIN_KEY, spec, now))
        return [response for response in responses if response is not None]

    def _decide(self, key: RequestKey) -> Response | None:
        asked = self.pending[key]
        if len(asked) + len([each for each in self.excused(key) if each not in asked]) < len(self.ranks):
            return None
        self.withdraw(key, decided=True)
        return self.judge(key, asked)

    def judge(self, key: RequestKey, asked: Mapping[int, RequestSpec]) -> Response:
        """Compare what the members ask for; those that have joined have no say."""
        positions = sorted(asked)
        ranks = [self.ranks[position] for position in positions]
        specs = [asked[position] for position in positions]
        first = specs[0]
        if key == JOIN_KEY:
            error = self._find_different_joins(ranks, specs)
            end = self.joins.end(self.ranks)
            self.joins = JoinState()
            return Response(key, first, end, error, uniform=False)
        if key == LEAVE_KEY:
            return Response(key, first, LeaveEnd.of([each.detail for each in specs]), uniform=False)
        uniform = all(spec == first for spec in specs)
        error = None if uniform else find_mismatch(key[1], ranks, specs)
        if error is None and len(ranks) < len(self.ranks):
            error = self._refuse_while_joined(key, first)
        if error is not None:
            return Response(key, first, None, error, uniform)
        extra = summarise(specs)
        if first.kind in PLANNED_KINDS:
            self.plans += 1
            self.joins.planned(self.plans)
            extra = extra._replace(serial=self.plans, spare_queue=self.joins.take_queue(extra.spare_queue))
        return Response(key, first, extra, None, uniform)

    def _find_different_joins(self, ranks: Sequence[int], specs: Sequence[RequestSpec]) -> HorovodInternalError | None:
        ways = [each.detail.how for each in specs]
        if len(set(ways)) == 1:
            return None
        said = _who_said_what(ranks, ways, str).replace(" passed ", " ")
        return MismatchError(f"Mismatched join: {said}. Join in the same way on every rank, with the same joinables.")

    def _refuse_while_joined(self, key: RequestKey, spec: RequestSpec) -> HorovodInternalError | None:
        reason = why_not(spec, known=self.joins.knows(key[1]))
        if reason is None:
            return None
        excused = list(self.excused(key))
        how = self.joins.requests[excused[0]].how
        joined = name_ranks(self.ranks[position] for position in excused)
        return HorovodInternalError(
            f"{key[0]} {key[1]!r} cannot run: {joined} {how} and takes no part. {reason}. Call it before any rank "
            "has joined, or after all ranks have."
        )

    def missing(self, key: RequestKey) -> list[int]:
        asked, excused = self.pending.get(key, {}), self.excused(key)
        return [rank for position, rank in enumerate(self.ranks) if position not in asked and position not in excused]

    def withdraw(self, key: RequestKey, *, decided: bool = False) -> None:
        """Forget a request; unless it was decided, it failed before all have asked."""
        self.pending.pop(key, None)
        self.since.pop(key, None)
        if key == JOIN_KEY and not decided:
            self.joins = JoinState()


def find_mismatch(name: str, ranks: Sequence[int], specs: Sequence[RequestSpec]) -> HorovodInternalError | None:
    kind = specs[0].kind
    if kind == "plan":
        return find_plan_mismatch(name, ranks, [spec.detail for spec in specs])
    if kind == "queue":
        return find_queue_mismatch(name, ranks, [spec.detail for spec in specs])
    for check in _CHECKS:
        if kind in check.kinds or not check.kinds:
            values = [check.value(spec) for spec in specs]
            if any(value != values[0] for value in values):
                said = _who_said_what(ranks, values, check.show)
                text = f"Mismatched {kind.upper()} {check.what} for {name!r}: {said}. {check.fix}"
                return check.error(text)
    return None


def summarise(specs: Sequence[RequestSpec]) -> Any:
    """What every member must know of the others to run the request."""
    first = specs[0]
    if first.kind == "allgather":
        return tuple(tuple(shape[0] if shape else 1 for shape in spec.shapes) for spec in specs)
    if first.kind == "plan":
        return merge_proposals([spec.detail for spec in specs])
    if first.kind == "queue":
        return merge_queue_proposals([spec.detail for spec in specs])
    # Tensors whose elements lie in the same order in memory on all ranks can be reduced in that order.
    return tuple(all(spec.strides[index] == stride for spec in specs) for index, stride in enumerate(first.strides))


def _who_said_what(ranks: Sequence[int], values: Sequence[Any], show: Callable[[Any], str]) -> str:
    """rank 0 has [3], ranks 1, 2 have [4]"""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(show(value), []).append(rank)
    return ", ".join(f"{name_ranks(members)} passed {shown}" for shown, members in groups.items())


def name_ranks(ranks: Iterable[int], most: int = 16) -> str:
    """rank 3; ranks 0, 2; ranks 0, 1, ... (64 in all)"""
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    shown = ", ".join(str(rank) for rank in listed[:most])
    return f"ranks {shown}" + (f", ... ({len(listed)} in all)" if len(listed) > most else "")


class _Check(NamedTuple):
    what: str
    value: Callable[[RequestSpec], Any]
    fix: str
    kinds: tuple[str, ...] = ()
    error: type[MismatchError] = MismatchError
    show: Callable[[Any], str] = str


def _show_shapes(shapes: Any) -> str:
    return str(list(shapes[0])) if len(shapes) == 1 else str([list(shape) for shape in shapes])


def _show_op(op: int) -> str:
    return op_name(ReduceOp(op))


_SHAPED = ("allreduce", "broadcast", "reducescatter", "empty_shared")
_DEVICE_FIX = "Move the tensors to the same kind of device on every rank."
_SHAPE_FIX = "Pass tensors of one shape, or pad them; for uneven batches see hvd.join()."
_SETS_FIX = "Add or remove the same process set on every rank, in the same order."

_CHECKS: tuple[_Check, ...] = (
    _Check(
        "arguments", lambda each: each.detail, _SETS_FIX, ("process_set",), show=lambda it: f"{it[0]} {list(it[1])}"
    ),
    _Check("CPU/GPU device selection", lambda each: each.device, _DEVICE_FIX, show=str.upper),
    _Check(
        "group lengths",
        lambda each: len(each.shapes),
        "Pass the same number of tensors on every rank.",
        show=lambda length: f"{length} tensors",
    ),
    _Check("data types", lambda each: each.dtypes, "Convert to one dtype before the call.", show=", ".join),
    _Check("reduction operation", lambda each: each.op, "Pass the same op on every rank.", show=_show_op),
    _Check(
        "prescale and/or postscale factors",
        lambda each: (each.prescale, each.postscale),
        "Pass the same factors on every rank.",
    ),
    _Check("root ranks", lambda each: each.root, "Pass the same root_rank on every rank.", show="root {}".format),
    _Check(
        "sparse tensor shapes",
        lambda each: each.detail,
        "Pass sparse tensors of one shape.",
        ("allgather",),
        ShapeMismatchError,
        lambda shape: str(list(shape)) if shape else "no sparse tensor",
    ),
    _Check(
        "tensor shapes",
        lambda each: tuple(shape[1:] for shape in each.shapes),
        "Only the first dimension may differ.",
        ("allgather", "alltoall"),
        ShapeMismatchError,
        lambda shapes: _show_shapes(shapes) + " after the first dimension",
    ),
    _Check("tensor shapes", lambda each: each.shapes, _SHAPE_FIX, _SHAPED, ShapeMismatchError, _show_shapes),
)


Entry = tuple[str, RequestSpec | int]  # A name, and a spec or the number of one that was announced before
ReadyList = list[tuple[tuple[int, ...], list[Entry]]]  # Which members, by position, ask for what, in this order


def tree_of(nodes: Sequence[Sequence[int]], position: int) -> tuple[int, Sequence[int]]:
    """Through whom the member at `position` speaks to the coordinator, and to whom it passes on what that says."""
    leader, *others = next(node for node in nodes if position in node)
    if position != leader:
        return leader, ()
    if position != 0:
        return 0, others
    # First what has the longest way.
    return 0, [*(node[0] for node in nodes if node[0] != 0), *others]


class NodeTable:
    def __init__(self, size: int, kind_of: Callable[[int], str]) -> None:
        """size: how many members the node has; kind_of: the kind of the spec that has this number."""
        self._size = size
        self._kind_of = kind_of
        self._asked: dict[RequestKey, dict[int, RequestSpec | int]] = {}  # By position; not told yet
        self._told: dict[RequestKey, int] = {}  # Of how many members the coordinator knows, where it knew only of some
        self._joining = False

    def collect(self, ready: ReadyList, *, at_once: bool = False) -> ReadyList:
        """Members of the node ask for these. Returns what to tell the coordinator now; at_once: everything."""
        told: ReadyList = []
        for positions, entries in ready:
            for name, entry in entries:
                key = (self._kind_of(entry) if isinstance(entry, int) else entry.kind, name)
                asked = self._asked.setdefault(key, {})
                asked.update(dict.fromkeys(positions, entry))
                self._joining = self._joining or key == JOIN_KEY
                if len(asked) + self._told.get(key, 0) == self._size and not self._joining:
                    del self._asked[key]
                    _add(told, name, asked)
            if at_once or self._joining:
                told += self.take()
        return told

    def take(self) -> ReadyList:
        """All that the coordinator was not told yet, in the order in which it was asked for first."""
        told: ReadyList = []
        for key, asked in self._asked.items():
            self._told[key] = self._told.get(key, 0) + len(asked)
            _add(told, key[1], asked)
        self._asked.clear()
        return told

    def decided(self, key: RequestKey) -> None:
        """The coordinator has announced `key`: whoever asks for it from now on begins anew."""
        self._asked.pop(key, None)
        self._told.pop(key, None)
        if key == JOIN_KEY:
            self._joining = False


def _add(told: ReadyList, name: str, asked: Mapping[int, RequestSpec | int]) -> None:
    for entry in dict.fromkeys(asked.values()):
        positions = tuple(position for position, each in asked.items() if each == entry)
        if told and told[-1][0] == positions:
            told[-1][1].append((name, entry))
        else:
            told.append((positions, [(name, entry)]))
