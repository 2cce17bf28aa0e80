"""Whether the launcher of this process still lives.

A launcher that was killed with -9 cannot end its ranks, and ranks that compute in Python notice nothing. The kernel
gives an orphan another parent; a shell script between launcher and rank (`mpirun ./run.sh`) hides that, therefore
shells are looked through.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "csh", "tcsh", "fish", "busybox"})


@dataclass(frozen=True)
class _Process:
    name: str
    parent: int


class ParentWatch:
    """Remembers the chain of parents up to the first that is no shell, and notices when it breaks."""

    def __init__(
        self, parent: Callable[[], int] = os.getppid, look: Callable[[int], _Process | None] | None = None
    ) -> None:
        """parent: gives this process's parent now; look: what a process is (default: ask /proc)."""
        self._parent = parent
        self._look = look or _look
        self._chain = self._climb()

    @property
    def launcher(self) -> int:
        """The process id of the first parent that is no shell."""
        return self._chain[-1]

    def is_orphan(self) -> bool:
        """Whether the launcher is gone. Costs some microseconds."""
        if self._parent() != self._chain[0]:
            return True
        # Without shells in between the first parent is all there is to look at.
        return len(self._chain) > 1 and self._climb()[: len(self._chain)] != self._chain

    def _climb(self) -> tuple[int, ...]:
        """Process ids from the parent upwards; all but the last are shells."""
        chain = [self._parent()]
        while (process := self._look(chain[-1])) is not None and process.name in _SHELLS and process.parent > 0:
            chain.append(process.parent)
        return tuple(chain)


def _look(pid: int) -> _Process | None:
    """Name and parent of a process; None where there is no /proc, or the process is gone."""
    try:
        return _parse(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None


def _parse(stat: str) -> _Process:
    """Read "pid (name) state parent ...", where the name may itself hold blanks and parentheses."""
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return _Process(name, int(rest.split()[1]))
