"""What bench rpc and bench autograd share: what a pair of ranks does, the session that measures it, TensorPipe's pair.

Rank 0 calls rank 1, whose main thread sleeps. bench autograd trains a network whose first half is on rank 0 and whose
second half is on rank 1. Both contestants run the same functions, over modules with the functions of torch's, each in
processes of its own.

TensorPipe polls: each of its processes keeps a core busy for as long as it runs. They are stopped (SIGSTOP) whenever
it is not their turn, and continued (SIGCONT) warm, with their connections as they are. Each runs `serve_as_peer` with
its rank, the file where both meet, and the file descriptor of its socket. Rank 0 of them answers requests for work; the
main thread of rank 1 sleeps until the benchmark ends.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch import Tensor, nn

import hvlike
from benchmarks.jobs import runs_on_two_ranks
from hvlike import rpc
from hvlike.bench.harness.benchmark import describe
from hvlike.bench.harness.comparison import timed
from hvlike.bench.harness.processes import Helpers, requests
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.errors import HvlikeError, LaunchError
from hvlike.observe.printing import format_size

CALLEE = 1

_BYTES_PER_TURN = 256 << 20
_MOST_TRIPS = 200
_WARM_UPS = 20
_CALLS, _CALLS_AT_ONCE = 300, 1500
_TOLERANCE = 1e-4
_STEP_WARM_UPS = 3
_SECONDS_PER_TURN = 0.25
_MOST_STEPS, _FEWEST_STEPS = 100, 5
Shape = tuple[int, int, int]  # Width of square layers with tanh, batch, and how many layers each rank has

# Not by `-m`: what is pickled here has this module's name in both programs.
_PEER_PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from benchmarks.rpc_session import serve_as_peer
serve_as_peer(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""
_rank_0_is_done = threading.Event()
_raw: list[RawMpi] = []  # Where the calls that rank 1 serves find plain MPI


def nothing() -> None:
    """The empty call."""


def echo(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Trip:
    """A call and its answer, one after the other: empty, or the echo of a tensor of so many bytes."""

    size: int

    @property
    def title(self) -> str:
        return f"echo of {format_size(self.size)}" if self.size else "empty call"

    @property
    def trips(self) -> int:
        return max(1, min(_MOST_TRIPS, _BYTES_PER_TURN // max(1, self.size)))

    @property
    def warm_ups(self) -> int:
        return max(1, min(_WARM_UPS, self.trips // 4))

    def measure(self, rpc: ModuleType) -> list[float]:
        """Seconds of each round trip. Blocks. Raises: HvlikeError when a wrong tensor comes back."""
        call = partial(rpc.rpc_sync, CALLEE, nothing)
        if self.size:
            tensor = torch.arange(self.size, dtype=torch.uint8)
            call = partial(rpc.rpc_sync, CALLEE, echo, (tensor,))
            if not torch.equal(call(), tensor):
                raise HvlikeError(f"{rpc.__name__}: the {self.title} is not what was sent")
        timed(call, self.warm_ups)
        return timed(call, self.trips)


@dataclass(frozen=True)
class Rate:
    """Empty calls by rpc_async, always so many of them in flight."""

    in_flight: int

    @property
    def title(self) -> str:
        return f"{self.in_flight} in flight"

    def measure(self, rpc: ModuleType) -> list[float]:
        """Seconds a call, one value. Blocks."""
        count = _CALLS if self.in_flight == 1 else _CALLS_AT_ONCE
        self._run(rpc, max(_WARM_UPS, self.in_flight))
        (seconds,) = timed(lambda: self._run(rpc, count), 1)
        return [seconds / count]

    def _run(self, rpc: ModuleType, count: int) -> None:
        flying: deque[Any] = deque()
        for _ in range(count):
            if len(flying) == self.in_flight:
                flying.popleft().wait()
            flying.append(rpc.rpc_async(CALLEE, nothing))
        for future in flying:
            future.wait()


@dataclass(frozen=True)
class Idle:
    seconds: float

    @property
    def title(self) -> str:
        return f"idle for {self.seconds:g} s"

    def measure(self, rpc: ModuleType) -> list[float]:
        """What each rank uses meanwhile, as a part of a core. Blocks."""
        before = self._used(rpc)
        start = time.perf_counter()
        time.sleep(self.seconds)
        elapsed = time.perf_counter() - start
        return [(after - used) / elapsed for after, used in zip(self._used(rpc), before, strict=True)]

    def _used(self, rpc: ModuleType) -> tuple[float, float]:
        return time.process_time(), rpc.rpc_sync(CALLEE, time.process_time)


@lru_cache
def half(shape: Shape, which: int) -> nn.Sequential:
    """One half of the network, the same weights in all processes, the same object for all steps of one."""
    width, _, count = shape
    generator = torch.Generator().manual_seed(which)
    layers: list[nn.Module] = []
    for _ in range(count):
        layer = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


@lru_cache
def inputs(shape: Shape) -> Tensor:
    return torch.randn(shape[1], shape[0], generator=torch.Generator().manual_seed(2))


def second_half(shape: Shape, hidden: Tensor) -> Tensor:
    output: Tensor = half(shape, 1)(hidden)
    return output


def _loss(shape: Shape) -> Tensor:
    return second_half(shape, half(shape, 0)(inputs(shape))).square().mean()


@dataclass(frozen=True)
class Step:
    """Forward by RPC, backward, get_gradients."""

    width: int
    batch: int
    layers: int
    unused: int = 0  # Calls of the second half whose results nothing uses

    @property
    def shape(self) -> Shape:
        return (self.width, self.batch, self.layers)

    @property
    def title(self) -> str:
        title = f"{self.layers}+{self.layers} layers of {self.width}, batch {self.batch}"
        return title + (f", {self.unused} unused results" if self.unused else "")

    def run(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> dict[Tensor, Tensor]:
        """One step; the gradients of rank 0. On rank 0, blocks."""
        shape = self.shape
        with autograd.context() as context:
            hidden = half(shape, 0)(inputs(shape))
            for _ in range(self.unused):
                rpc.rpc_sync(CALLEE, second_half, (shape, hidden))
            loss = rpc.rpc_sync(CALLEE, second_half, (shape, hidden)).square().mean()
            autograd.backward(context, [loss], **mode)
            found: dict[Tensor, Tensor] = autograd.get_gradients(context)
        return found

    def measure(self, rpc: ModuleType, autograd: ModuleType, **mode: str) -> list[float]:
        """Seconds of each of some steps after a few that do not count. Raises: HvlikeError for wrong gradients."""
        run = partial(self.run, rpc, autograd, **mode)
        found = run()
        for parameter, right in zip(half(self.shape, 0).parameters(), expected(self.shape), strict=True):
            allowed = _TOLERANCE * float(right.abs().max())
            if parameter not in found or not torch.allclose(found[parameter], right, rtol=0.0, atol=allowed):
                raise HvlikeError(f"{autograd.__name__}: wrong gradients of {self.title}")
        each = sum(timed(run, _STEP_WARM_UPS)) / _STEP_WARM_UPS
        return timed(run, max(_FEWEST_STEPS, min(_MOST_STEPS, int(_SECONDS_PER_TURN / each))))


@lru_cache
def expected(shape: Shape) -> tuple[Tensor, ...]:
    """The gradients of the first half by ordinary autograd."""
    return torch.autograd.grad(_loss(shape), list(half(shape, 0).parameters()))


def steps_alone(step: Step) -> list[float]:
    """Seconds of each of some steps in one process, without RPC: what the arithmetic takes."""
    parameters = [*half(step.shape, 0).parameters(), *half(step.shape, 1).parameters()]
    taken = timed(lambda: torch.autograd.grad(_loss(step.shape), parameters), _FEWEST_STEPS * 4)
    return taken[_FEWEST_STEPS:]


Work = Trip | Rate | Idle | Step


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
                    command = [sys.executable, "-c", _PEER_PROGRAM, *arguments]
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


def serve_as_peer(rank: int, meeting: str, descriptor: int) -> None:
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
