"""What messages are about, and counters of what leaves a rank: control messages by kind, and data between nodes.

Control messages are those of the channel: readiness, agreements, shutdown. Data are tensors: messages between ranks
of different nodes, and calls of MPI's own collectives (only MPI knows how many messages one of these becomes). Data
inside a node is shared memory and counts as no message. Counters only grow.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Topic(enum.IntEnum):
    """Who handles a message: every topic has one handler on each rank. The numbers are part of the wire format."""

    MAILBOX = 1  # values that a coroutine waits for by sender and key (Mailbox)
    CONTROLLER = 2  # requests and responses of the negotiated operations, for each process set
    SHUTDOWN = 3  # the ranks that end their program or call shutdown()
    RPC = 4
    ZERO_STATE = 5  # state of ZeRO's optimizer that one rank asks another one for
    METRICS = 6
    DEVICE = 7  # failures of a GPU backend
    GROUP_CALLS = 8  # how many calls a member of a group of torch.distributed has made in it, or why it cannot go on
    POINT_TO_POINT = 9  # send and recv of the groups of torch.distributed
    STORE = 10  # calls to the store of torch.distributed, which rank 0 holds
    STORE_ANSWER = 11
    HEARTBEAT = 12  # when each node was last heard of
    BENCH_READY = 990  # messages of the LogGP benchmark: what a rank sends when it is ready
    BENCH_TOLD = 991  # messages of the LogGP benchmark: what rank 0 announces


@dataclass
class Sent:
    """What a rank has sent up to a moment, or between two: the later one minus the earlier."""

    control: Mapping[str, int] = field(default_factory=dict)  # Messages of each kind that was sent
    control_bytes: int = 0
    data_messages: int = 0
    data_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0  # Size of the buffers this rank has given to them

    @property
    def control_messages(self) -> int:
        return sum(self.control.values())

    def __sub__(self, earlier: Sent) -> Sent:
        control = Counter(self.control)
        control.subtract(earlier.control)
        others = {name: value - getattr(earlier, name) for name, value in vars(self).items() if name != "control"}
        return Sent({kind: count for kind, count in control.items() if count}, **others)


@dataclass
class Traffic(Sent):
    """The counters of one rank. Written from inside the loop only, read by any thread."""

    control: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> Sent:
        return Sent(**{**vars(self), "control": dict(self.control)})

    def count_collective(self, nbytes: int) -> None:
        self.collectives += 1
        self.collective_bytes += nbytes


class CountedComm:
    """A communicator of mpi4py that counts what is sent through it, as lists that begin with an array."""

    def __init__(self, comm: Any, traffic: Traffic) -> None:
        self._comm = comm
        self._traffic = traffic

    def Isend(self, buffer: Any, *others: Any, **named: Any) -> Any:
        self._traffic.data_messages += 1
        self._traffic.data_bytes += buffer[0].nbytes
        return self._comm.Isend(buffer, *others, **named)

    def Ibcast(self, buffer: Any, *others: Any, **named: Any) -> Any:
        self._traffic.count_collective(buffer[0].nbytes)
        return self._comm.Ibcast(buffer, *others, **named)

    def Iallreduce(self, source: Any, target: Any, *others: Any, **named: Any) -> Any:
        self._traffic.count_collective(target[0].nbytes)
        return self._comm.Iallreduce(source, target, *others, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)
