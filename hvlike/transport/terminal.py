"""Whether a person sees what this rank prints on stderr.

A launcher stands in between, and what it gives its ranks says nothing of its own output: under Open MPI stdout always
is a terminal (of its making) and stderr never is. So the launcher's own stderr is looked at.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

_LAUNCHERS = frozenset(
    {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr"}
)
_MOST_PARENTS = 8
_WIDTH = 80


def columns_of_terminal(stderr_of: Callable[[], str | None] | None = None) -> int | None:
    """How wide the terminal is that shows this rank's stderr; None where there is none. Local.

    stderr_of: gives the file that the launcher's stderr is (default: looked up in /proc).
    """
    stream = sys.stderr
    if stream is None or stream.closed:
        return None
    if stream.isatty():
        return _columns(stream.fileno())
    path = (stderr_of or _launchers_stderr)()
    if path is None or not path.startswith(("/dev/pts/", "/dev/tty")):
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _columns(descriptor) if os.isatty(descriptor) else None
    finally:
        os.close(descriptor)


def _columns(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or _WIDTH
    except OSError:
        return _WIDTH


def _launchers_stderr() -> str | None:
    """The file that the stderr of the launcher is; of several in a row (mpirun and its helper) the outermost."""
    process, found = os.getppid(), None
    for _ in range(_MOST_PARENTS):
        try:
            stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
            if stat.partition("(")[2].rpartition(")")[0] not in _LAUNCHERS:
                break
            found = os.readlink(f"/proc/{process}/fd/2")
        except OSError:
            # It has ended, or belongs to somebody else, as the helper of a batch system does.
            break
        process = int(stat.rpartition(")")[2].split()[1])
    return found
