"""Distributed autograd in the timeline, while one is recorded.

autograd backwards 1, 2 ...     BACKWARD: what this worker does for a backward; inside, each SEGMENT that it runs
autograd messages               SEND: a message leaves whose tensors require grad; GRADIENTS: some leave or arrive
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvlike.autograd.context import Send
from hvlike.autograd.engine import SegmentRecord
from hvlike.autograd.messages import Heading
from hvlike.autograd.protocol import BackwardMessage
from hvlike.observe.recorder import Recorder
from hvlike.rpc.agent.profiling import TimelineRows

_MESSAGES = "autograd messages"


class BackwardTrace:
    """One backward on one worker."""

    def __init__(self, recorder: Recorder, heading: Heading) -> None:
        """It begins."""
        self._recorder = recorder
        self._heading = heading
        self._stay = _rows_of(recorder).enter()
        self._shown = 0
        mode = heading.mode.name.lower()
        self._stay.begin("BACKWARD", {"context": heading.context, "number": heading.number, "mode": mode})

    def ran(self, segments: Sequence[SegmentRecord]) -> None:
        """These have run so far."""
        for segment in segments[self._shown :]:
            now, here = self._recorder.now, time.perf_counter_ns()
            said = {"kind": segment.kind, "nodes": segment.nodes, "leaves": segment.leaves}
            said |= {"gradients of": list(segment.sends), "gradients for": list(segment.recvs)}
            self._stay.begin("SEGMENT", said, now - (here - segment.start))
            self._stay.end(at=now - (here - segment.end))
        self._shown = len(segments)

    def letter(self, letter: BackwardMessage, *, to: int | None = None, source: int | None = None) -> None:
        """Gradients leave for a worker, or have come from one."""
        if letter.gradients and self._recorder.on:
            where = {"to": to} if to is not None else {"from": source}
            said = {"context": self._heading.context, "messages": list(letter.gradients), **where}
            self._recorder.instant(self._recorder.row(_MESSAGES), "GRADIENTS", said)

    def ended(self, error: str | None) -> None:
        """It has ended on this worker."""
        self._stay.end({"error": error} if error is not None else None)
        self._stay.leave()


def show_send(recorder: Recorder, context: int, send: Send) -> None:
    """A message with tensors that require grad is on its way."""
    said = {"context": context, "message": send.message, "to": send.rank, "tensors": len(send.edges)}
    recorder.instant(recorder.row(_MESSAGES), f"SEND {send.about}".rstrip(), said)


class _Process:
    rows: TimelineRows | None = None


def _rows_of(recorder: Recorder) -> TimelineRows:
    if _Process.rows is None or _Process.rows.recorder is not recorder:
        _Process.rows = TimelineRows(recorder, "autograd backwards")
    return _Process.rows
