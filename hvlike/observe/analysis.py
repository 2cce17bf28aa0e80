"""Where the time of training steps, named operations and remote calls went: pure functions of timelines.

A step of a rank lasts from the end of one exposed wait to the end of the next one in the same row:

    | compute ........................ | wait: for others  | reduction |
                                       ^ this rank arrives ^ the last rank arrives

Compute is all time outside of exposed waits, data loading included. Reduction that runs beside it is hidden.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from hvlike.observe.trace_reader import RankTrace, Span, common, length, union

_ASKED = "NEGOTIATE_"


@dataclass(frozen=True)
class Operations:
    """All operations of one kind on all ranks. Times are averages in milliseconds."""

    kind: str
    count: int
    bytes: int
    agreement: float  # Time from the call until all ranks had called
    queue: float
    execution: float
    longest_agreement: float


@dataclass(frozen=True)
class Calls:
    """Remote calls of one function. Times in milliseconds."""

    what: str  # "call": from the call to the answer. "queue", "run" and "later": phases of the worker that serves it.
    function: str
    count: int
    mean: float
    longest: float


def operations(traces: Sequence[RankTrace]) -> list[Operations]:
    """Return the named operations by kind, those that took most time in all first."""
    kinds: dict[str, dict[str, list[Span]]] = {}
    for trace in traces:
        for spans in trace.rows.values():
            kind = next((span.name.removeprefix(_ASKED) for span in spans if span.name.startswith(_ASKED)), None)
            if kind is not None:
                phases = kinds.setdefault(kind.lower(), {})
                for span in spans:
                    phases.setdefault(span.name, []).append(span)
    found = []
    for kind, phases in kinds.items():
        asked, queued, run = (phases.get(name, []) for name in (f"{_ASKED}{kind.upper()}", "QUEUE", kind.upper()))
        nbytes = sum(span.arguments.get("bytes", 0) for span in asked)
        longest = max((span.length for span in asked), default=0.0) / 1000
        found.append(Operations(kind, len(asked), nbytes, _mean(asked), _mean(queued), _mean(run), longest))
    return sorted(found, key=lambda each: each.count * (each.agreement + each.queue + each.execution), reverse=True)


def calls(traces: Sequence[RankTrace]) -> list[Calls]:
    """Return the remote calls by function, those that took most time in all first."""
    spans: dict[tuple[str, str], list[Span]] = {}
    for trace in traces:
        for title, row in trace.matching("rpc "):
            for span in row:
                if span.depth == 0:
                    what = "call" if title.startswith("calls") else span.name.lower()
                    spans.setdefault((what, str(span.arguments.get("function", span.name))), []).append(span)
    found = [
        Calls(what, function, len(each), _mean(each), max(span.length for span in each) / 1000)
        for (what, function), each in spans.items()
    ]
    return sorted(found, key=lambda each: each.count * each.mean, reverse=True)


def _mean(spans: Iterable[Span]) -> float:
    lengths = [span.length for span in spans]
    return sum(lengths) / len(lengths) / 1000 if lengths else 0.0


Key = tuple[int, int]  # A step: how often its row has started to number anew before, and its number


@dataclass(frozen=True)
class Parts:
    """The time of a step, or the average of several, in milliseconds."""

    step: float = 0.0
    compute: float = 0.0
    others: float = 0.0  # Exposed wait until the last rank had arrived
    reduction: float = 0.0  # Exposed wait after that
    hidden: float = 0.0  # Reduction beside compute, which is in no sum


@dataclass(frozen=True)
class RankSteps:
    rank: int
    host: str
    steps: dict[Key, Parts]

    @property
    def mean(self) -> Parts:
        count = max(1, len(self.steps))
        sums = {each.name: sum(getattr(parts, each.name) for parts in self.steps.values()) for each in fields(Parts)}
        return Parts(**{name: value / count for name, value in sums.items()})


@dataclass(frozen=True)
class Training:
    """The steps of one optimizer or wrapped model on all ranks that have a timeline."""

    name: str
    process_set: int
    ranks: list[RankSteps]
    last_to_come: Counter[int]  # How often each rank was the last to arrive at the reduction


def trainings(traces: Sequence[RankTrace]) -> list[Training]:
    """Return everything that has steps in these timelines, the one with the most first."""
    names: dict[tuple[str, int], list[tuple[RankTrace, dict[Key, Span]]]] = {}
    for trace in traces:
        for name, spans in trace.matching("step of "):
            by_set: dict[int, list[Span]] = {}
            for span in spans:
                by_set.setdefault(span.arguments.get("process_set", 0), []).append(span)
            for number, waits in by_set.items():
                names.setdefault((name, number), []).append((trace, _numbered(waits)))
    found = [_training(name, number, ranks) for (name, number), ranks in names.items()]
    counts = [(sum(len(rank.steps) for rank in each.ranks), each) for each in found]
    return [each for count, each in sorted(counts, key=lambda each: each[0], reverse=True) if count]


def _training(name: str, process_set: int, ranks: Sequence[tuple[RankTrace, dict[Key, Span]]]) -> Training:
    arrivals: dict[Key, dict[int, float]] = {}
    for trace, waits in ranks:
        for key, wait in waits.items():
            arrivals.setdefault(key, {})[trace.rank] = wait.start
    complete = {key: starts for key, starts in arrivals.items() if len(starts) == len(ranks)}
    last = {key: max(starts.values()) for key, starts in complete.items()}
    found = [RankSteps(trace.rank, trace.host, _steps(trace, waits, last)) for trace, waits in ranks]
    counted = {key for each in found for key in each.steps if key in complete and len(ranks) > 1}
    latest = Counter(max(complete[key], key=lambda rank: complete[key][rank]) for key in counted)
    return Training(name, process_set, found, latest)


def _steps(trace: RankTrace, waits: dict[Key, Span], last: dict[Key, float]) -> dict[Key, Parts]:
    """Return the parts of each step but the first, whose start is not known."""
    exposed = union((span.start, span.end) for _, row in trace.matching("step of ") for span in row)
    busy = union(
        (span.start, span.end)
        for title, row in trace.matching("set ")
        if title.split()[1:2] == ["queue"]
        for span in row
        if span.depth == 0
    )
    steps = {}
    ordered = sorted(waits.items(), key=lambda each: each[1].end)
    for (_, before), (key, wait) in itertools.pairwise(ordered):
        whole = [(before.end, wait.end)]
        waiting, working = common(exposed, whole), common(busy, whole)
        arrived = min(max(last.get(key, wait.start), wait.start), wait.end)
        others = arrived - wait.start
        step, total = length(whole), length(waiting)
        hidden = length(working) - length(common(working, waiting))
        steps[key] = Parts(*(each / 1000 for each in (step, step - total, others, total - others, hidden)))
    return steps


def _numbered(waits: Sequence[Span]) -> dict[Key, Span]:
    """Return waits by step. The numbers start anew with each new plan."""
    numbered: dict[Key, Span] = {}
    turn, previous = 0, -1
    for wait in waits:
        number = int(wait.arguments.get("step", previous + 1))
        turn += number <= previous
        numbered[turn, number] = wait
        previous = number
    return numbered
