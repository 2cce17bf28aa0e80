"""A group: some ranks of the world, in rising order, and how they lie on the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvlike.transport.world import World

# Open MPI sends messages with this tag on the parent communicator, where the channel uses tag 1 and those from 16.
_FIRST_TAG, _TAGS = 2, 14


class Group:
    """The members of one process set, seen from one of them. Positions count within the group."""

    def __init__(self, world: World, number: int, ranks: Sequence[int]) -> None:
        """Local. `number` is the same on all members and differs from that of every other group."""
        self.world = world
        self.number = number
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(world.rank)
        position = {rank: index for index, rank in enumerate(self.ranks)}
        nodes = (tuple(position[rank] for rank in node if rank in position) for node in world.nodes)
        self.nodes = tuple(node for node in nodes if node)
        self.node = next(node for node in self.nodes if self.rank in node)
        self.local_rank = self.node.index(self.rank)
        self.local_size = len(self.node)
        self.homogeneous = len({len(node) for node in self.nodes}) == 1
        self.comm: Any = None
        self.cross_comm: Any = None

    def connect(self) -> None:
        """Make the communicators that traffic between nodes needs; nothing on one node.

        Collective over the group and blocking; groups that share ranks are connected in the same order everywhere.
        """
        if len(self.nodes) == 1:
            return
        world = self.world.comm.Get_group()
        members = world.Incl(self.ranks)
        self.comm = self.world.comm.Create_group(members, tag=_FIRST_TAG + self.number % _TAGS)
        members.Free()
        world.Free()
        self.comm.Set_errhandler(self.world.mpi.ERRORS_RETURN)
        # Nodes of different size have no matching local ranks: there the first rank of each node crosses for all.
        crosses = self.homogeneous or self.local_rank == 0
        self.cross_comm = self.comm.Split(self.local_rank if crosses else self.world.mpi.UNDEFINED, self.rank)

    def disconnect(self) -> None:
        """Free the communicators. Collective over the group."""
        for comm in (self.cross_comm, self.comm):
            if comm is not None and comm != self.world.mpi.COMM_NULL:
                comm.Free()
        self.comm = self.cross_comm = None
