"""start_timeline and stop_timeline: recording when the user wants it."""

from __future__ import annotations

import os

from hvlike.collectives.context import current
from hvlike.errors import UsageError


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what the operations of this rank do into a Chrome-trace file, which is valid JSON at every moment.

    file_path: the file of rank 0; rank 1 writes timeline.rank1.json beside timeline.json, and so on. It is begun anew.
    mark_cycles: also show each announcement of the coordinator.
    Local, may be called at any time, does not block; arrows between ranks need it on all of them. Unlike with Horovod,
    HVLIKE_TIMELINE=DYNAMIC need not be set. Returns None.
    Raises: NotInitializedError; UsageError (a ValueError) when a timeline is recorded already, or the file cannot be
        written; on the calling rank only.
    Source: horovod.torch.start_timeline.
    """
    context = current()
    if not isinstance(file_path, (str, os.PathLike)):
        raise UsageError(f"start_timeline: expected the path of a file, got {type(file_path).__name__}.")
    limit = context.knobs.timeline_max_bytes
    context.fabric.recorder.start(os.fspath(file_path), mark_cycles=bool(mark_cycles), max_bytes=limit)


def stop_timeline() -> None:
    """Write what was recorded and close the file; does nothing when no timeline is recorded.

    Local, may be called at any time, does not block. Returns None. Raises: NotInitializedError.
    Source: horovod.torch.stop_timeline.
    """
    current().fabric.recorder.stop()
