"""Reading timelines: the files of ranks, merged or cut off; and their events as intervals in rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
