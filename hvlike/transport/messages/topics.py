"""The topics of the channel: who handles a message. Every topic has one handler on each rank."""

from __future__ import annotations

import enum


class Topic(enum.IntEnum):
    """What a message is about. Numbers are part of the wire format; all ranks of a job run the same version."""

    MAILBOX = 1  # values that a coroutine waits for by sender and key (Mailbox)
    CONTROLLER = 2  # requests and responses of the negotiated operations, for each process set
    SHUTDOWN = 3  # the ranks that end their program or call shutdown()
    RPC = 4
    ZERO_STATE = 5  # state of ZeRO's optimizer that one rank asks another one for
    METRICS = 6
    DEVICE = 7  # failures of a GPU backend
    BENCH_READY = 990  # messages of the LogGP benchmark: what a rank sends when it is ready
    BENCH_TOLD = 991  # messages of the LogGP benchmark: what rank 0 announces
