"""Counters of what leaves a rank: control messages by kind, and data between nodes. They only grow.

Control messages are those of the channel: readiness, agreements, shutdown. Data are tensors: messages between ranks
of different nodes, and calls of MPI's own collectives (only MPI knows how many messages one of these becomes). Data
inside a node is shared memory and counts as no message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sent:
    """What a rank has sent up to a moment, or between two: the later one minus the earlier."""

    control: Mapping[str, int] = field(default_factory=dict)
    """Control messages of each kind; kinds that were not sent are not there."""
    control_bytes: int = 0
    data_messages: int = 0
    data_bytes: int = 0
    collectives: int = 0
    """Calls of MPI's own collectives."""
    collective_bytes: int = 0
    """Size of the buffers this rank has given to them."""

    @property
    def control_messages(self) -> int:
        """Control messages of all kinds."""
        return sum(self.control.values())

    def __sub__(self, earlier: Sent) -> Sent:
        """What was sent since `earlier`."""
        kinds = {kind: count - earlier.control.get(kind, 0) for kind, count in self.control.items()}
        return Sent(
            {kind: count for kind, count in kinds.items() if count},
            self.control_bytes - earlier.control_bytes,
            self.data_messages - earlier.data_messages,
            self.data_bytes - earlier.data_bytes,
            self.collectives - earlier.collectives,
            self.collective_bytes - earlier.collective_bytes,
        )


class Traffic:
    """The counters of one rank. Written from inside the loop only, read by any thread."""

    def __init__(self) -> None:
        self._control: Counter[str] = Counter()
        self._control_bytes = 0
        self._messages = 0
        self._message_bytes = 0
        self._collectives = 0
        self._collective_bytes = 0

    def control(self, kind: str, nbytes: int) -> None:
        """A control message of `nbytes` leaves."""
        self._control[kind] += 1
        self._control_bytes += nbytes

    def message(self, nbytes: int) -> None:
        """A message with data leaves."""
        self._messages += 1
        self._message_bytes += nbytes

    def collective(self, nbytes: int) -> None:
        """A buffer of `nbytes` is given to a collective of MPI."""
        self._collectives += 1
        self._collective_bytes += nbytes

    def snapshot(self) -> Sent:
        """What this rank has sent so far."""
        return Sent(
            dict(self._control),
            self._control_bytes,
            self._messages,
            self._message_bytes,
            self._collectives,
            self._collective_bytes,
        )


class CountedComm:
    """A communicator of mpi4py for data between nodes; counts what is sent through it, and is the same otherwise.

    Buffers are given as lists that begin with an array, as everywhere in the planes.
    """

    def __init__(self, comm: Any, traffic: Traffic) -> None:
        self._comm = comm
        self._traffic = traffic

    def Isend(self, buffer: Any, *others: Any, **named: Any) -> Any:
        """Start a message."""
        self._traffic.message(buffer[0].nbytes)
        return self._comm.Isend(buffer, *others, **named)

    def Ibcast(self, buffer: Any, *others: Any, **named: Any) -> Any:
        """Start a broadcast."""
        self._traffic.collective(buffer[0].nbytes)
        return self._comm.Ibcast(buffer, *others, **named)

    def Iallreduce(self, source: Any, target: Any, *others: Any, **named: Any) -> Any:
        """Start a reduction."""
        self._traffic.collective(target[0].nbytes)
        return self._comm.Iallreduce(source, target, *others, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)
