"""Timelines for tests, written by recorders whose clock the test sets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvlike.observe.recorder import Recorder, path_of_rank
from hvlike.observe.timelines import RankTrace, rank_traces

Phase = tuple[str, str, float, float, dict[str, Any]]
"""Row, name, beginning and end in milliseconds, arguments."""

STEP, LANE = "step of one", "set 0 queue 1"


def wait(step: int, start: float, end: float, row: str = STEP) -> Phase:
    """An exposed wait."""
    return (row, "WAIT", start, end, {"step": step, "process_set": 0})


def bucket(start: float, end: float) -> Phase:
    """A bucket that is reduced."""
    return (LANE, "BUCKET 0", start, end, {"bytes": 8})


def write(folder: Path, phases: Sequence[Sequence[Phase]]) -> list[Path]:
    """The files of some ranks."""
    paths = []
    for rank, of_rank in enumerate(phases):
        recorder = Recorder(rank, len(phases), f"host{rank}", 0)
        recorder.start(str(folder / "t.json"), mark_cycles=False, max_bytes=1_000_000)
        events = [(start, "B", phase) for phase in of_rank for start in [phase[2]]]
        events += [(phase[3], "E", phase) for phase in of_rank]
        for at, kind, (row, name, _, _, arguments) in sorted(events, key=lambda each: (each[0], each[1] == "B")):
            number = recorder.row(row)
            if kind == "B":
                recorder.begin(number, name, arguments, int(at * 1e6))
            else:
                recorder.end(number, at=int(at * 1e6))
        recorder.stop()
        paths.append(Path(path_of_rank(str(folder / "t.json"), rank)))
    return paths


def traces(folder: Path, *phases: Sequence[Phase]) -> list[RankTrace]:
    """The same, read."""
    return rank_traces(json.loads(path.read_text()) for path in write(folder, phases))
