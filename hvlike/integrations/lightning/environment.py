"""The ranks of hvlike, in Lightning's words."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from hvlike.collectives import lifecycle
from hvlike.errors import UsageError


class HvlikeEnvironment(ClusterEnvironment):
    """Who and where this rank is; mpirun has decided it. Needs hvlike to be initialised.

    Source: lightning.fabric.plugins.environments.ClusterEnvironment.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: mpirun does."""
        return True

    @property
    def main_address(self) -> str:
        """Not there: the ranks know each other by MPI. Raises: UsageError."""
        raise UsageError("hvlike's ranks know each other by MPI: there is no main address, and no port.")

    @property
    def main_port(self) -> int:
        """As `main_address`."""
        raise UsageError("hvlike's ranks know each other by MPI: there is no main address, and no port.")

    @staticmethod
    def detect() -> bool:
        """Whether hvlike runs."""
        return lifecycle.is_initialized()

    def world_size(self) -> int:
        """Number of ranks."""
        return lifecycle.size()

    def set_world_size(self, size: int) -> None:
        """Ignored: mpirun has decided it."""

    def global_rank(self) -> int:
        """This rank."""
        return lifecycle.rank()

    def set_global_rank(self, rank: int) -> None:
        """Ignored: mpirun has decided it."""

    def local_rank(self) -> int:
        """This rank among those of its node."""
        return lifecycle.local_rank()

    def node_rank(self) -> int:
        """The number of this node."""
        return lifecycle.cross_rank()
