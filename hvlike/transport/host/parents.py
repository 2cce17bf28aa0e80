"""The processes above this one: whether the launcher lives, and how wide the terminal is that shows its stderr.

A launcher killed with -9 cannot end its ranks, and ranks that compute in Python notice nothing. The kernel gives an
orphan another parent. What stands between launcher and rank (`mpirun ./run.sh`, `mpirun uv run train.py`, `timeout`)
hides that, therefore `LauncherWatch` looks through all processes above this one that have the variables of this rank,
which a launcher gives to the processes that it starts and does not have itself.

A rank's own stdout and stderr do not tell whether a person watches: under Open MPI stdout always is a terminal (made
by Open MPI) and stderr never is. So `columns_of_terminal` looks at the stderr of the launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from hvlike.transport.host.launcher_table import LAUNCHERS, PROCESSES

T = TypeVar("T")

_MOST_PARENTS = 8
_COLUMNS = 80


class ParentProcess(NamedTuple):
    name: str
    parent: int


def read_process(pid: int) -> ParentProcess | None:
    """Name and parent of a process; None where there is no /proc, or the process is gone."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None


def parse_stat(stat: str) -> ParentProcess:
    """Read "pid (name) state parent ...", where the name may itself hold blanks and parentheses."""
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return ParentProcess(name, int(rest.split()[1]))


def environment_of(process: int | str) -> dict[str, str]:
    """The variables with which a process was started; empty where it cannot be seen. process: an id, or "self"."""
    try:
        text = Path(f"/proc/{process}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(each.partition("=")[::2] for each in text.split("\0"))


def rank_of(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    """What the innermost launcher has told a process about itself; the same in processes that this one starts, and in
    no others of the machine. Empty without a launcher.
    """
    for kind in LAUNCHERS:
        found = tuple(environment.get(name) for name in (kind.rank, *kind.identity) if kind.starts_mpi)
        if any(found):
            return found
    return ()


class LauncherWatch:
    """Remembers the chain of parents up to the first that is not of this rank, and notices when it breaks."""

    def __init__(
        self,
        parent: Callable[[], int] = os.getppid,
        read: Callable[[int], ParentProcess | None] = read_process,
        environment: Callable[[int | str], Mapping[str, str]] = environment_of,
    ) -> None:
        self._parent = parent
        self._read = read
        # Process ids from the parent upwards; all but the last are of this rank.
        self.chain = self._climb(environment)

    @property
    def launcher(self) -> int:
        return self.chain[-1]

    def is_orphan(self) -> bool:
        """Whether the launcher is gone. Costs some microseconds."""
        current: int | None = self._parent()
        for place, process in enumerate(self.chain):
            if current != process:
                return True
            if place + 1 < len(self.chain):
                known = self._read(process)
                current = None if known is None else known.parent
        return False

    def _climb(self, environment: Callable[[int | str], Mapping[str, str]]) -> tuple[int, ...]:
        chain, own = [self._parent()], rank_of(environment("self"))
        while own and rank_of(environment(chain[-1])) == own:
            process = self._read(chain[-1])
            if process is None or process.parent <= 0:
                break
            chain.append(process.parent)
        return tuple(chain)


def columns_of_terminal(stderr_of: Callable[[], str | None] | None = None) -> int | None:
    """How many characters wide the terminal is that shows this rank's stderr; None where there is none."""
    stream = sys.stderr
    if stream is None or _answer(lambda: stream.closed):
        return None
    if _answer(lambda: stream.isatty()):
        return _columns(_answer(lambda: stream.fileno()))
    path = (stderr_of or _stderr_of_launcher)()
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


def _answer(ask: Callable[[], T]) -> T | None:
    """What the program's stderr answers, which may be any object; None where it fails."""
    try:
        return ask()
    except Exception:
        return None


def _columns(descriptor: int | None) -> int:
    try:
        return _COLUMNS if descriptor is None else os.get_terminal_size(descriptor).columns or _COLUMNS
    except OSError:
        return _COLUMNS


def _stderr_of_launcher() -> str | None:
    """The file that the launcher's stderr is; of several launchers in a row (mpirun and its helper) the outermost."""
    pid, found = LauncherWatch().launcher, None
    for _ in range(_MOST_PARENTS):
        process = read_process(pid)
        if process is None or process.name not in PROCESSES:
            break
        try:
            found = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            # It belongs to another user, as the helper of a batch system does.
            break
        pid = process.parent
    return found
