"""Every way in which a rank can end, in every phase."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from support.failures.case import Case
from support.failures.phases import PHASES

PREAMBLE = """
import ctypes, os, resource, signal, sys, time
import torch

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
SIZE = {size}
FAILING = {failing}
FAILS = RANK == FAILING
PHASE = {phase!r}
RPC_SECONDS = {rpc_seconds}

def end():
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"END {{time.time()}}\\n")
    sys.stdout.flush()

def fail():
    end()
    {body}
"""

STUCK = ("in fail", "does not answer", "in init()", "RPC ran for more than")
LIMITS = {"HVLIKE_STALL_CHECK_TIME_SECONDS": "1", "HVLIKE_STALL_SHUTDOWN_TIME_SECONDS": "3"}
"""A rank that hangs ends nothing by itself: the job has limits."""


@dataclass(frozen=True)
class Failure:
    """A way to fail: a line of Python, and words of which one must be on stderr."""

    body: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def _by_signal(number: int, *names: str) -> tuple[str, ...]:
    """How a launcher names a signal (Open MPI: "signal 9 (Killed)", MPICH: "signal 9" or "EXIT CODE: 9")."""
    return f"signal {number}", f"EXIT CODE: {number}", *names


FAILURES = {
    "exception": Failure("raise ValueError('boom')", ("ValueError: boom",)),
    "sys.exit(7)": Failure("sys.exit(7)", ("status 7", "SystemExit: 7")),
    "SIGTERM": Failure("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", _by_signal(15, "vanished")),
    "SIGINT": Failure("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", ("KeyboardInterrupt",)),
    "SIGKILL": Failure("os.kill(os.getpid(), signal.SIGKILL)", _by_signal(9, "vanished")),
    "SIGSEGV": Failure("ctypes.string_at(0)", _by_signal(11, "Segmentation fault")),
    "out of memory": Failure(
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32)); torch.ones(1 << 34)",
        ("can't allocate memory", "MemoryError"),
    ),
    "hang": Failure("time.sleep(500)", STUCK, LIMITS),
    # A signal ends one sleep of C.
    "hang with the lock": Failure("while True: ctypes.PyDLL(None).sleep(500)", STUCK, LIMITS),
}


def failing_rank(ranks: int) -> int:
    """The last one; of 3 ranks rank 0, which coordinates."""
    return 0 if ranks == 3 else ranks - 1


def case_of(failure: str, phase: str, ranks: int) -> Case:
    """The program of this failure in this phase."""
    how = FAILURES[failure]
    head = PREAMBLE.format(
        size=ranks, failing=failing_rank(ranks), phase=phase, rpc_seconds=3 if how.env else 60, body=how.body
    )
    return Case(failure, phase, ranks, head + PHASES[phase], how.words, how.env)


def endings() -> list[Case]:
    """Every failure in every phase at 2 to 4 ranks."""
    return [case_of(failure, phase, ranks) for failure in FAILURES for phase in PHASES for ranks in (2, 3, 4)]
