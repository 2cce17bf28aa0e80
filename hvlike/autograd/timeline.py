"""Distributed autograd in the timeline, while one is recorded.

autograd backwards 1, 2 ...     what this worker does for a backward: BACKWARD, in it each SEGMENT that it runs
autograd messages               SEND, a message whose tensors require grad leaves; GRADIENTS, some leave or come
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvlike.autograd.distributed_context import Send
from hvlike.autograd.letter import Letter
from hvlike.autograd.messages import Heading
from hvlike.autograd.segment import Segment
from hvlike.observe.recorder import Recorder
from hvlike.rpc.overlapping_rows import OverlappingRows

_MESSAGES = "autograd messages"


class Observed:
    """One backward on one worker."""

    def __init__(self, recorder: Recorder, heading: Heading) -> None:
        """It begins."""
        self._recorder = recorder
        self._heading = heading
        self._stay = _rows_of(recorder).enter()
        self._shown = 0
        mode = heading.mode.name.lower()
        self._stay.begin("BACKWARD", {"context": heading.context, "number": heading.number, "mode": mode})

    def ran(self, segments: Sequence[Segment]) -> None:
        """These have run so far."""
        for segment in segments[self._shown :]:
            now, here = self._recorder.now, time.perf_counter_ns()
            said = {"kind": segment.kind, "nodes": segment.nodes, "leaves": segment.leaves}
            said |= {"gradients of": list(segment.sends), "gradients for": list(segment.recvs)}
            self._stay.begin("SEGMENT", said, now - (here - segment.start))
            self._stay.end(at=now - (here - segment.end))
        self._shown = len(segments)

    def letter(self, letter: Letter, *, to: int | None = None, source: int | None = None) -> None:
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
    rows: OverlappingRows | None = None


def _rows_of(recorder: Recorder) -> OverlappingRows:
    if _Process.rows is None or _Process.rows.recorder is not recorder:
        _Process.rows = OverlappingRows(recorder, "autograd backwards")
    return _Process.rows
