"""Who reports a failure: one process of a job on each node (FirstReport), which names the others that failed, too.

When ranks disagree or one has gone, all others raise, and their tracebacks would be printed through each other. Nothing
here raises: without sockets everybody reports.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

_LINE_BYTES = 400
_MOST_OTHERS = 10_000
_SHOWN_OTHERS = 4
_SHOWN_CHARACTERS = 160
_POLL_SECONDS = 0.05


class FirstReport:
    """The right to report, which one process of a job has on each node. A rank that wants to report claims a name that
    only one process of the node can have: an abstract Unix socket named after the launcher. This needs no setup and no
    other rank, leaves no file and ends with its process.
    """

    def __init__(self, job: str) -> None:
        """job: the same text in all processes of the job on this node, and in no other process."""
        self.address = f"\0hvlike-failure-{os.getuid()}-{job}"
        self._socket: socket.socket | None = None

    def claim(self, rank: int, summary: str) -> bool:
        """Whether this process is to report; else the one that does is told. Without such sockets everybody reports."""
        if self._socket is not None:
            return True
        claimed = _open_socket()
        if claimed is None:
            return True
        try:
            claimed.bind(self.address)
        except OSError as error:
            # An error here: the one that reports has ended meanwhile, or has been told more than it can hold.
            with claimed, contextlib.suppress(OSError):
                if error.errno == errno.EADDRINUSE:
                    claimed.connect(self.address)
                    claimed.send(f"{rank} {summary}".encode(errors="backslashreplace")[:_LINE_BYTES])
            return error.errno != errno.EADDRINUSE
        self._socket = claimed
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process has the right."""
        return self._socket is not None

    def others(self) -> list[tuple[int, str]]:
        """Ranks of this node, and the summaries they have told the one that reports, so far."""
        if self._socket is None:
            return []
        told: list[tuple[int, str]] = []
        # One that does not block raises this when there is no more.
        with contextlib.suppress(OSError):
            for _ in range(_MOST_OTHERS):
                rank, _, summary = self._socket.recv(_LINE_BYTES).decode(errors="replace").partition(" ")
                # Any process of this machine may send something here.
                if rank.isdecimal():
                    told.append((int(rank), "".join(filter(str.isprintable, summary))))
        return told

    def release(self) -> None:
        """Let another process of the job have the right; the end of this one does the same."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def wait_for_holder(self, deadline: float) -> None:
        """Sleep while another process holds the right, at most until `deadline` of time.monotonic()."""
        while self._socket is None and time.monotonic() < deadline:
            probe = _open_socket()
            if probe is None:
                return
            with probe:
                if probe.connect_ex(self.address) != 0:
                    return
            time.sleep(_POLL_SECONDS)


def _open_socket() -> socket.socket | None:
    """A socket that does not block; None where there is none to be had, in a program that has opened too many files."""
    try:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return None
    found.setblocking(False)
    return found


def describe_others(others: Sequence[tuple[int, str]], own: str) -> str:
    """The other failures in a line: "ranks 0, 3 (the same), rank 2 (KeyError: 'x')"; `own`: what has been reported."""
    same = sorted(rank for rank, summary in others if own.startswith(summary))
    parts = [f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))} (the same)"] if same else []
    different = [f"rank {rank} ({summary[:_SHOWN_CHARACTERS]})" for rank, summary in others if rank not in same]
    parts += different[:_SHOWN_OTHERS]
    more = f" and {len(different) - _SHOWN_OTHERS} more" if len(different) > _SHOWN_OTHERS else ""
    return ", ".join(parts) + more


def job_name(launcher: int) -> str:
    """A name for the job that the process `launcher` has started on this node: its id, and when it began."""
    try:
        # Behind the name, which may hold blanks, the start time is the 20th field.
        began = Path(f"/proc/{launcher}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "0"
    return f"{launcher}-{began}"
