"""What follows from an event of the lifetime protocol: collected under the lock, carried out without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

REGISTER, REGISTERED, ACCEPTED, DELETE, DROPPED = 30, 31, 32, 33, 34
"""Kinds of notices.

REGISTER    user -> owner      this worker has the fork now        (RRef, fork)
REGISTERED  owner -> user      the owner knows it                  (fork,)
ACCEPTED    receiver -> sender the parent need not vouch any more  (parent, child)
DELETE      user -> owner      the fork is gone; so many fetches were made through it  (RRef, fork, fetches)
DROPPED     user -> itself     from the finaliser                  (fork,)
"""


class Notice(NamedTuple):
    """A message without an answer, for Agent.notify."""

    rank: int
    kind: int
    value: tuple[Any, ...]


@dataclass
class Effects:
    """Messages to send, work that may start, and values nobody refers to any more."""

    notices: list[Notice] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    """What waited for a value: quick, holds no lock."""
    starts: list[Callable[[], None]] = field(default_factory=list)
    """What waited for the confirmation of its arguments: functions of callers."""
    freed: list[Any] = field(default_factory=list)
    """Entries: their values may have finalisers of the user's, which run where the last reference is let go."""
