"""The names of RRefs and of their forks, unique in a session without asking anybody."""

from __future__ import annotations

from typing import NamedTuple


class GlobalId(NamedTuple):
    """Rank and counter of the worker that gave the name. Travels as a plain tuple, which is equal to it."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class Ticket(NamedTuple):
    """What an RRef is while it travels: the child that the receiver is to have, and who vouches for it meanwhile.

    Hand-over | parent             | the receiver
    ----------+--------------------+---------------------------------------------------------------------------------
    owner to  | none               | has the child, which the owner knows since the message was built
    user      |                    |
    user to   | the sender's fork  | takes the value out of its table, tells the sender
    owner     |                    |
    user to   | the sender's fork  | has the owner register the child; on its answer the child is confirmed and the
    user      |                    | sender told
    owner to  | none               | takes the value out of its table: the child was a reservation, not a fork
    itself    |                    |

    A parent that vouches for a child is kept from being deleted until the sender has been told.
    """

    rref: GlobalId
    owner: int
    child: GlobalId
    parent: GlobalId | None

    def pack(self) -> tuple[int, ...]:
        """The numbers that travel."""
        return (*self.rref, self.owner, *self.child, *(self.parent or ()))

    @classmethod
    def unpack(cls, numbers: tuple[int, ...]) -> Ticket:
        """The ticket of these numbers."""
        parent = GlobalId(*numbers[5:]) if len(numbers) > 5 else None
        return cls(GlobalId(*numbers[:2]), numbers[2], GlobalId(*numbers[3:5]), parent)
