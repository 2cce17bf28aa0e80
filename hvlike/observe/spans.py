"""What a timeline holds, as intervals: for each rank its rows, for each row what began and ended in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """Something with a beginning and an end; times in microseconds since the job began."""

    name: str
    start: float
    end: float
    arguments: Mapping[str, Any]
    depth: int
    """0 for what lies in nothing else of its row."""

    @property
    def length(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class RankTrace:
    """The timeline of one rank."""

    rank: int
    host: str
    rows: dict[str, list[Span]] = field(default_factory=dict)
    """By the title of the row; in the order of their ends."""

    def matching(self, prefix: str) -> Iterator[tuple[str, list[Span]]]:
        """The rows whose titles begin so, and what follows in the title."""
        for title, spans in self.rows.items():
            if title.startswith(prefix):
                yield title.removeprefix(prefix), spans


def rank_traces(traces: Iterable[Mapping[str, Any]]) -> list[RankTrace]:
    """The ranks of some timelines, of one rank each or merged, in their order. What did not end is left out."""
    found = []
    for trace in traces:
        about = trace["otherData"]
        ranks: Sequence[Mapping[str, Any]] = about.get("ranks", [about])
        for each in ranks:
            events = [event for event in trace["traceEvents"] if event.get("pid") == each["rank"]]
            found.append(RankTrace(each["rank"], each.get("host", ""), _rows(events)))
    return sorted(found, key=lambda each: each.rank)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments in intervals that do not touch, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The moments that are in both; each is a union."""
    shared, one, other = [], 0, 0
    while one < len(first) and other < len(second):
        start, end = max(first[one][0], second[other][0]), min(first[one][1], second[other][1])
        if start < end:
            shared.append((start, end))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return shared


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """How long they are together; they do not overlap."""
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
