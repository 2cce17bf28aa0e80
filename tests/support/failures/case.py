"""One row of the table of failures: a program in which something fails, and what must be seen of that."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LIMIT_SECONDS = 10.0
"""From the failure to the end of mpirun."""


@dataclass(frozen=True)
class Case:
    """A job; the failing rank prints END and the time just before it fails."""

    failure: str
    phase: str
    ranks: int
    program: str
    """Of all ranks."""
    words: tuple[str, ...]
    """One of these must be in what is printed; MPICH's launcher names signals on stdout."""
    env: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    """Shell commands that run before mpirun in a mount namespace of their own."""
    afterwards: str = ""
    """A program that must end well in another job afterwards; FOLDER is the same for both."""
    ends_well: bool = False
    """The job must end with 0 all the same."""

    def __str__(self) -> str:
        return f"{self.failure}, {self.phase}, {self.ranks} ranks"
