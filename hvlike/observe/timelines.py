"""Timelines: reading the files of ranks, merged or cut off, and where the time of steps and calls in them went.

A step of a rank lasts from the end of one exposed wait to the end of the next one in the same row:

    | compute ........................ | wait: for others  | reduction |
                                       ^ this rank arrives ^ the last rank arrives

Compute is all time outside of exposed waits, data loading included. Reduction that runs beside it is hidden.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hvlike.errors import UsageError
from hvlike.observe.recorder import path_of_rank


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the trace with the events of the files of some ranks, in the order of the ranks. Raises: as read_all."""
    traces = sorted(read_all(paths, merged=False), key=lambda each: int(each["otherData"]["rank"]))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"ranks": [trace["otherData"] for trace in traces]},
        "traceEvents": [event for trace in traces for event in trace["traceEvents"]],
    }


def read_all(paths: Sequence[Path], *, merged: bool = True) -> list[dict[str, Any]]:
    """Read timelines; beside that of one rank alone, also those of the other ranks that lie beside it.

    Raises: UsageError for a file that is none of hvlike, and for a rank that is in two of them.
    """
    traces = [read(path, merged=merged) for path in paths]
    if len(paths) == 1:
        found_beside = dict(_beside(paths[0], traces[0]["otherData"]))
        paths, traces = [*paths, *found_beside], [*traces, *found_beside.values()]
    found: dict[int, Path] = {}
    for path, trace in zip(paths, traces, strict=True):
        for each in abouts(trace):
            rank = each["rank"]
            if rank in found:
                raise UsageError(f"rank {rank} is in {found[rank]} and in {path}: leave one of them out.")
            found[rank] = path
    return traces


def _beside(path: Path, about: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the timelines of the other ranks of this job, of which `path` is one; none beside a merged one."""
    rank, size = about.get("rank", 0), about.get("size", 1)
    first = path.with_name(f"{path.stem.removesuffix(f'.rank{rank}')}{path.suffix}") if rank else path
    for other in range(size):
        candidate = Path(path_of_rank(str(first), other))
        if other == rank or not candidate.exists():
            continue
        # Another job may have left its files there.
        with suppress(UsageError):
            trace = read(candidate)
            if (trace["otherData"]["rank"], trace["otherData"].get("size")) == (other, size):
                yield candidate, trace


def abouts(trace: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what a timeline says about its rank, or about each of several."""
    about = trace["otherData"]
    ranks: Sequence[Mapping[str, Any]] = about.get("ranks", [about])
    return ranks


def read(path: Path, *, merged: bool = False) -> dict[str, Any]:
    """Read the timeline of one rank; of one that was cut off, all complete events. Raises: UsageError.

    merged: accept also one of several ranks, which has "ranks" in its otherData.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    trace = _parsed(text) or _whole_part(text)
    about = trace.get("otherData", {}) if isinstance(trace, dict) and "traceEvents" in trace else {}
    if "rank" not in about and not (merged and "ranks" in about):
        raise UsageError(
            f"{path} is not the timeline of a rank: hvlike writes them with HVLIKE_TIMELINE or start_timeline."
        )
    whole: dict[str, Any] = trace
    return whole


def _whole_part(text: str) -> Any:
    """Return the complete part of a cut file, None without a head. The head is a line, and so is every event."""
    head, *lines = text.splitlines() or [""]
    trace = _parsed(head + "]}")
    if isinstance(trace, dict):
        for event in map(_parsed, (line.removesuffix(",") for line in lines)):
            if event is None:
                break
            trace["traceEvents"].append(event)
    return trace


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Span:
    """Something with a start and an end, in microseconds since the job began."""

    name: str
    start: float
    end: float
    arguments: Mapping[str, Any]
    depth: int  # The number of spans of its row that it lies in

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass
class RankTrace:
    rank: int
    host: str
    rows: dict[str, list[Span]] = field(default_factory=dict)  # By the title of the row, in the order of their ends

    def matching(self, prefix: str) -> Iterator[tuple[str, list[Span]]]:
        """Yield the rows whose titles start with `prefix`, with the rest of the title."""
        for title, spans in self.rows.items():
            if title.startswith(prefix):
                yield title.removeprefix(prefix), spans


def rank_traces(traces: Iterable[Mapping[str, Any]]) -> list[RankTrace]:
    """Return the ranks of some timelines, merged or not, in their order. What did not end is left out."""
    found = []
    for trace in traces:
        for each in abouts(trace):
            events = [event for event in trace["traceEvents"] if event.get("pid") == each["rank"]]
            found.append(RankTrace(each["rank"], each.get("host", ""), _rows(events)))
    return sorted(found, key=lambda each: each.rank)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same times as intervals that do not touch, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that are in both of two unions."""
    shared, one, other = [], 0, 0
    while one < len(first) and other < len(second):
        (start, end), (other_start, other_end) = first[one], second[other]
        if max(start, other_start) < min(end, other_end):
            shared.append((max(start, other_start), min(end, other_end)))
        one, other = (one + 1, other) if end < other_end else (one, other + 1)
    return shared


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _rows(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    titles: dict[int, str] = {}
    rows: dict[str, list[Span]] = {}
    open_events: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        kind, row = event.get("ph"), event.get("tid", 0)
        if kind == "M" and event.get("name") == "thread_name":
            titles[row] = event["args"]["name"]
        elif kind == "B":
            open_events.setdefault(row, []).append(event)
        elif kind == "E" and open_events.get(row):
            begun = open_events[row].pop()
            arguments = {**begun.get("args", {}), **event.get("args", {})}
            span = Span(begun.get("name", ""), begun["ts"], event["ts"], arguments, len(open_events[row]))
            rows.setdefault(titles.get(row, str(row)), []).append(span)
    return rows


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
