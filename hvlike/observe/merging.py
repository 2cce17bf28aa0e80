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


def read(path: Path) -> dict[str, Any]:
    """The timeline of one rank; of one that was cut off, all whole events.

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
    if not isinstance(trace, dict) or "traceEvents" not in trace or "rank" not in trace.get("otherData", {}):
        raise UsageError(f"{path} is no timeline of a rank: hvlike writes them with HVLIKE_TIMELINE or start_timeline.")
    return trace


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
