"""What bench rpc and bench autograd share: a session in which rank 0 measures, and TensorPipe's two processes.

TensorPipe polls: each of its processes keeps a core busy for as long as it runs. They are stopped (SIGSTOP) whenever
it is not their turn, and continued (SIGCONT) warm, with their connections as they are. Each runs this file
(`python -m hvlike.bench.rpc_session`) with its rank, the file where both meet, and the file descriptor of its socket.
Rank 0 of them answers requests for work; the main thread of rank 1 sleeps until the benchmark ends.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed.autograd
import torch.distributed.rpc

import hvlike
from hvlike import rpc
from hvlike.bench.harness.benchmark import describe, runs_on_two_ranks
from hvlike.bench.harness.processes import Helpers, requests
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.rpc_work import CALLEE, Step, Work
from hvlike.errors import HvlikeError, LaunchError

_rank_0_is_done = threading.Event()
_raw: list[RawMpi] = []  # Where the calls that rank 1 serves find plain MPI


class TensorPipePair:
    """The two processes as rank 0 of ours sees them. They are stopped between their turns."""

    def __init__(self, cores: Sequence[Sequence[int]]) -> None:
        """Start them, each on the cores of one of our ranks. Raises: LaunchError, OSError."""
        self._helpers = Helpers("torch.distributed.rpc")
        # They meet there again when they shut down.
        self._folder = tempfile.TemporaryDirectory(prefix="hvlike-bench-")
        try:
            for rank, each in enumerate(cores):
                ours, theirs = Pipe()
                self._helpers.ends.append(ours)
                with theirs:
                    arguments = [str(rank), str(Path(self._folder.name) / "meeting"), str(theirs.fileno())]
                    command = [sys.executable, "-m", "hvlike.bench.rpc_session", *arguments]
                    process = self._helpers.start(command, pass_fds=[theirs.fileno()])
                os.sched_setaffinity(process.pid, each)
            for end in self._helpers.ends:
                self._helpers.ask(end)
        except BaseException:
            self._helpers.close(0.0)
            self._folder.cleanup()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._helpers.processes]

    def measure(self, work: Work) -> list[float]:
        """Have them do some work; returns what it has measured. Raises: HvlikeError."""
        self._signal(signal.SIGCONT)
        answer = self._helpers.ask(self._helpers.ends[0], work)
        self._signal(signal.SIGSTOP)
        if isinstance(answer, str):
            raise HvlikeError(f"torch.distributed.rpc: {answer}")
        samples: list[float] = answer
        return samples

    def _signal(self, number: signal.Signals) -> None:
        for process in self._helpers.processes:
            process.send_signal(number)

    def close(self) -> None:
        """Hang up, upon which they shut down together and end."""
        self._signal(signal.SIGCONT)
        self._helpers.close()
        self._folder.cleanup()


def start_tensorpipe(cores: Sequence[Sequence[int]], without: str | None) -> TensorPipePair | str:
    """Start TensorPipe's processes on rank 0, or say why they take no part. without: the user's reason for that."""
    if without is not None:
        return without
    if hvlike.local_size() != hvlike.size():
        return "the ranks are on several nodes, its processes here are on one"
    if not torch.distributed.rpc.is_available():
        return "this torch was built without it"
    try:
        return TensorPipePair(cores)
    except (LaunchError, OSError) as error:
        return str(error)


@dataclass(frozen=True)
class Session:
    conditions: dict[str, Any]
    raw: RawMpi
    pair: TensorPipePair | str  # Or why there is none


def run_session(benchmark: str, without: str | None, measure: Callable[[Session], None]) -> int:
    """Start hvlike, RPC and TensorPipe, and measure on rank 0, while the main thread of rank 1 sleeps.

    without: why TensorPipe is to take no part; None: it takes part if it can. Collective; two ranks. Returns the exit
    status.
    """
    if not runs_on_two_ranks(benchmark):
        return 2
    conditions = describe(benchmark)
    cores = hvlike.allgather_object(sorted(os.sched_getaffinity(0)), name="bench.cores")
    rpc.init_rpc(f"worker{hvlike.rank()}")
    raw = RawMpi()
    _raw.append(raw)
    if hvlike.rank() == 0:
        pair = start_tensorpipe(cores, without)
        try:
            measure(Session(conditions, raw, pair))
        finally:
            if isinstance(pair, TensorPipePair):
                pair.close()
        rpc.rpc_sync(CALLEE, _end)
    else:
        _rank_0_is_done.wait()
        _rank_0_is_done.clear()
    _raw.remove(raw)
    raw.free()
    rpc.shutdown()
    hvlike.shutdown()
    return 0


def _end() -> None:
    _rank_0_is_done.set()


def round_trips(raw: RawMpi, size: int, count: int) -> list[float]:
    """Seconds of round trips by plain MPI. On rank 0; rank 1 takes part in a thread that serves a call."""
    other = rpc.rpc_async(CALLEE, _take_part, (size, count))
    taken = raw.round_trips(size, count)
    other.wait()
    return taken


def _take_part(size: int, count: int) -> None:
    _raw[-1].round_trips(size, count)


def main(rank: int, meeting: str, descriptor: int) -> None:
    """Join TensorPipe's pair, answer requests, and leave with the other process."""
    # A stopped process of a group of its own is ended by the kernel when its parent goes, also by kill -9.
    os.setpgid(0, 0)
    connected = Connection(descriptor)
    theirs: Any = torch.distributed.rpc
    # torch uses deprecated calls itself.
    warnings.simplefilter("ignore")
    options = theirs.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    theirs.init_rpc(f"peer{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    connected.send(rank)
    for work in requests(connected):
        connected.send(_measured(work))
    theirs.shutdown()


def _measured(work: Work) -> list[float] | str:
    theirs = torch.distributed.rpc
    try:
        return work.measure(theirs, torch.distributed.autograd) if isinstance(work, Step) else work.measure(theirs)
    except (HvlikeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
