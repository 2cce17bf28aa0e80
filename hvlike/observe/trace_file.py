"""A Chrome-trace file that grows and is valid JSON after every write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvlike.errors import UsageError

_CLOSING = b"\n]}\n"


class TraceFile:
    """Each write goes over the closing brackets and puts them behind the new events again, in one system call."""

    def __init__(self, path: str, about: Mapping[str, Any], first: Mapping[str, Any], max_bytes: int) -> None:
        """Begin the file anew. about: what the file says of itself; first: its first event.

        Raises: UsageError when the file cannot be written.
        """
        self.path = path
        self._max_bytes = max_bytes
        self._descriptor = _open(path, os.O_TRUNC)
        head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": []}).encode()
        start = head.removesuffix(b"]}") + b"\n" + json.dumps(first).encode()
        os.pwrite(self._descriptor, start + _CLOSING, 0)
        self._size = len(start)

    def write(self, events: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> bool:
        """Add events; when they do not fit any more, add `last` in their place. Returns False then.

        Raises: OSError when the disk is full, say; the file stays as it was.
        """
        block = b"".join(b",\n" + json.dumps(event).encode() for event in events)
        fits = self._size + len(block) + len(_CLOSING) <= self._max_bytes
        if not fits:
            block = b",\n" + json.dumps(last).encode()
        self._append(block)
        return fits

    def _append(self, block: bytes) -> None:
        data = block + _CLOSING
        try:
            written = os.pwrite(self._descriptor, data, self._size)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes written to {self.path}")
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            os.pwrite(self._descriptor, _CLOSING, self._size)
            raise
        self._size += len(block)

    def close(self) -> None:
        """Give the file back; it is complete."""
        os.close(self._descriptor)


def check_writable(path: str, rank: int) -> None:
    """See whether a rank can write its file; what is in it stays. Raises: UsageError."""
    os.close(_open(path_of_rank(path, rank), 0))


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
    except OSError as error:
        raise UsageError(f"timeline: the file {path} cannot be written: {error.strerror}.") from None


def path_of_rank(path: str, rank: int) -> str:
    """The file of a rank: timeline.json for rank 0, timeline.rank1.json for rank 1."""
    if rank == 0:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}"))
