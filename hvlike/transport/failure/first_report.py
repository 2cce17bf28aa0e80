"""Which rank of a node reports its failure: the first one. The others send it one line each.

When ranks disagree, all of them raise; when one rank has gone, all others raise. Without a rule, N tracebacks would be
printed through each other. So a rank that wants to report claims a name that only one process of the node can have:
an abstract Unix socket named after the launcher. This needs no setup and no other rank, so it works from the first
line of init() to the last of the program; it leaves no file and ends with its process.
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


class FirstReport:
    """The right to report, which one process of a job has on each node."""

    def __init__(self, job: str) -> None:
        """job: the same text in all processes of the job on this node, and in no other process."""
        self.address = f"\0hvlike-failure-{os.getuid()}-{job}"
        self._socket: socket.socket | None = None

    def claim(self, rank: int, summary: str) -> bool:
        """Whether this process is the one that reports; if it is not, the one that does is told rank and summary.

        Where the system has no such sockets everybody reports.
        """
        if self._socket is not None:
            return True
        claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        claimed.setblocking(False)
        try:
            claimed.bind(self.address)
        except OSError as error:
            # An error here: the one that reports has ended meanwhile, or has been told more than it can hold.
            with claimed, contextlib.suppress(OSError):
                if error.errno == errno.EADDRINUSE:
                    claimed.connect(self.address)
                    claimed.send(f"{rank} {summary}".encode()[:_LINE_BYTES])
            return error.errno != errno.EADDRINUSE
        self._socket = claimed
        return True

    def others(self) -> list[tuple[int, str]]:
        """Ranks of this node, and the summaries they have told the one that reports, so far."""
        if self._socket is None:
            return []
        told: list[tuple[int, str]] = []
        # One that does not block raises this when there is no more.
        with contextlib.suppress(BlockingIOError):
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
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.setblocking(False)
                if probe.connect_ex(self.address) != 0:
                    return
            time.sleep(0.05)


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
