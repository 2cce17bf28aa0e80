"""One timeline of the timelines of all ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvlike.errors import UsageError


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """The trace with the events of all files, in the order of the ranks.

    Raises: UsageError for a file that is no timeline of hvlike, and for two files of one rank.
    """
    traces = sorted(((path, read(path)) for path in paths), key=lambda each: int(each[1]["otherData"]["rank"]))
    for (one, first), (other, second) in itertools.pairwise(traces):
        if first["otherData"]["rank"] == second["otherData"]["rank"]:
            raise UsageError(
                f"{one} and {other} are both of rank {first['otherData']['rank']}: merge only one of them."
            )
    return {
        "displayTimeUnit": "ms",
        "otherData": {"ranks": [trace["otherData"] for _, trace in traces]},
        "traceEvents": [event for _, trace in traces for event in trace["traceEvents"]],
    }


def read_all(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Timelines of ranks, and merged ones.

    Raises: UsageError for a file that is no timeline of hvlike, and for a rank that is in two of them.
    """
    traces = [read(path, merged=True) for path in paths]
    ranks: dict[int, Path] = {}
    for path, trace in zip(paths, traces, strict=True):
        for each in trace["otherData"].get("ranks", [trace["otherData"]]):
            other = ranks.setdefault(each["rank"], path)
            if other != path:
                raise UsageError(f"rank {each['rank']} is in {other} and in {path}: leave one of them out.")
    return traces


def read(path: Path, *, merged: bool = False) -> dict[str, Any]:
    """The timeline of one rank; of one that was cut off, all whole events.

    merged: accept also one of several ranks, which has "ranks" in its otherData.
    Raises: UsageError when the file cannot be read or is no timeline of a rank.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        trace = json.loads(text)
    except ValueError:
        trace = _whole_part(text)
    about = trace.get("otherData", {}) if isinstance(trace, dict) and "traceEvents" in trace else {}
    if "rank" not in about and not (merged and "ranks" in about):
        raise UsageError(f"{path} is no timeline of a rank: hvlike writes them with HVLIKE_TIMELINE or start_timeline.")
    whole: dict[str, Any] = trace
    return whole


def _whole_part(text: str) -> Any:
    """What is whole of a file that was cut: the head is a line, and so is every event; None without a head."""
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
