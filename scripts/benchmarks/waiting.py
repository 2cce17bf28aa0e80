"""bench waiting: what a rank's waiting costs its own computation, and how soon it notices that the wait is over.

Rank 0 starts an operation for which rank 1 comes late, and computes meanwhile: any slowdown is due to its own
waiting. Once where the system puts the threads, once with the main thread and the background thread of a rank
on one core, the hard case. Rank 1 sleeps in a system call and uses no core.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvlike
from benchmarks.jobs import runs_on_two_ranks
from hvlike.bench.harness.benchmark import add_common, describe, heading
from hvlike.bench.harness.comparison import Summary, with_samples
from hvlike.bench.harness.report import Bars, publish, table, with_quartiles
from hvlike.collectives.requests.request import Request, spec_of_tensors
from hvlike.collectives.session.context import current
from hvlike.observe.printing import format_seconds

PURPOSE = "how waiting slows a computing rank, and how soon it wakes"

Work = Callable[[], object]
NOTHING, AGAIN = "nothing", "nothing, again"
NAMED, PLANNED = "a named allreduce", "a bucket of gradients"
_SHOWN = (AGAIN, NAMED, PLANNED)
WAITS = (NOTHING, *_SHOWN)
IN_SYNCHRONIZE = "(waits in synchronize)"
_WORK_SECONDS = 0.04
_NAME = "bench waiting"
_ELEMENTS = 1 << 18
# Starts an operation, calls what it is given while the operation is in flight, and waits for its end.
Operation = Callable[[Callable[[], None]], None]
FREE, ONE_CORE = "threads where the system puts them", "both threads of a rank on one core"
_REPETITIONS = 15
_LATENCIES = 4  # So many times as many latencies are measured: each is short


def open_bell() -> int:
    """Return this end of a named pipe to wake rank 1: not by hvlike nor MPI, whose waiting is measured. Collective."""
    folder = tempfile.mkdtemp(prefix="hvlike-bench-") if hvlike.rank() == 0 else None
    path: str = hvlike.broadcast_object(folder and str(Path(folder) / "bell"), name="bench waiting: bell")
    if folder is not None:
        os.mkfifo(path)
    hvlike.barrier()
    # Each open waits for the other one.
    bell = os.open(path, os.O_WRONLY if hvlike.rank() == 0 else os.O_RDONLY)
    if folder is not None:
        shutil.rmtree(folder)
    return bell


def works() -> dict[str, Work]:
    """One short piece of work of each kind, well below a millisecond where that is possible."""
    a, b, product = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch, x = torch.randn(32, 64), torch.zeros(64)

    def train() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    def small_operations() -> None:
        for _ in range(50):
            x.add_(1.0)

    def python() -> None:
        total = 0
        for number in range(2000):
            total += number * number

    return {
        "matmul": partial(torch.mm, a, b, out=product),
        "forward and backward": train,
        "small operations": small_operations,
        "pure Python": python,
    }


def repeated(work: Work, seconds: float) -> Work:
    """Return work that takes about so many seconds: the piece again and again."""
    for _ in range(3):
        work()
    start = time.perf_counter()
    pieces = 0
    while time.perf_counter() - start < seconds:
        work()
        pieces += 1

    def run() -> None:
        for _ in range(pieces):
            work()

    return run


def operations() -> dict[str, Operation]:
    """An allreduce by name, and a step whose only bucket starts in backward. Collective: takes the first step."""
    tensor, parameter = torch.zeros(_ELEMENTS), torch.nn.Parameter(torch.zeros(_ELEMENTS))
    optimizer = hvlike.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))

    def named(between: Callable[[], None]) -> None:
        handle = hvlike.allreduce_async_(tensor, op=hvlike.Sum, name=_NAME)
        between()
        hvlike.synchronize(handle)

    def planned(between: Callable[[], None]) -> None:
        optimizer.zero_grad()
        loss: Any = parameter.sum()
        loss.backward()
        between()
        optimizer.step()

    planned(lambda: None)
    return {NAMED: named, PLANNED: planned}


def slowdowns(works: Mapping[str, Work], repetitions: int, seed: int, bell: int) -> dict[str, dict[str, list[float]]]:
    """Return on rank 0 seconds[work][wait], one value a repetition; rank 1 sleeps. Collective; two ranks."""
    started = operations()
    order = random.Random(seed)
    long = {name: repeated(work, _WORK_SECONDS) for name, work in works.items()} if hvlike.rank() == 0 else {}
    seconds: dict[str, dict[str, list[float]]] = {name: {wait: [] for wait in WAITS} for name in long}
    for _ in range(repetitions):
        for name in works:
            for wait in order.sample(WAITS, len(WAITS)):
                if hvlike.rank() == 0:
                    seconds[name][wait].append(_timed(long[name], started.get(wait), bell))
                elif wait in started:
                    os.read(bell, 1)
                    started[wait](lambda: None)
    return seconds


def _timed(work: Work, operation: Operation | None, bell: int) -> float:
    """Seconds of the work with an operation in flight for which rank 1 comes only afterwards."""
    taken = 0.0

    def timed() -> None:
        nonlocal taken
        # The cost of starting is not that of waiting: the background thread has picked it up and sleeps by now.
        time.sleep(0.005)
        start = time.perf_counter()
        work()
        taken = time.perf_counter() - start
        if operation is not None:
            os.write(bell, b".")

    if operation is None:
        timed()
    else:
        operation(timed)
    return taken


def latencies(works: Mapping[str, Work], repetitions: int, seed: int, bell: int) -> dict[str, list[float]]:
    """Seconds from the call of rank 1, which comes late, to the end of the operation on rank 0. Collective; two ranks.

    Rank 0 computes meanwhile, or waits in synchronize.
    """
    pause = random.Random(seed)
    tensor = torch.zeros(16)
    found: dict[str, list[float]] = {}
    for name, work in {IN_SYNCHRONIZE: None, **works}.items():
        moments = []
        for _ in range(repetitions):
            late = 0.003 + 0.004 * pause.random()
            if hvlike.rank() == 0:
                moments.append(_completion(tensor, work, bell))
            else:
                os.read(bell, 1)
                time.sleep(late)
                moments.append(time.monotonic())
                _begin(tensor, lambda request: None).result()
        of_ranks: list[list[float]] = hvlike.allgather_object(moments, name=f"{_NAME}: moments")
        found[name] = [ended - called for ended, called in zip(*of_ranks, strict=True)]
    return found


def _begin(tensor: torch.Tensor, finish: Callable[[Request], float | None]) -> hvlike.Handle:
    """Start an allreduce by name, as allreduce_async_ does. finish runs in the loop when it ends."""
    signature = spec_of_tensors("allreduce", [tensor], op=int(hvlike.Sum))
    set_state = current().find_set(None, "Allreduce")
    # Rank 1 waits at once, as in allreduce_(); on rank 0 the background thread takes it.
    return set_state.controller.submit(signature, _NAME, [tensor], finish, wake=hvlike.rank() == 0)


def _completion(tensor: torch.Tensor, work: Work | None, bell: int) -> float:
    """Start the operation, compute until it has ended, and return when that was."""
    handle = _begin(tensor, lambda request: time.monotonic())
    time.sleep(0.001)
    os.write(bell, b".")
    while work is not None and not handle.done():
        work()
    moment: float = handle.result()
    return moment


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the seconds of each wait divided by those of waiting for nothing, within a repetition."""
    alone = seconds[NOTHING]
    others = {wait: each for wait, each in seconds.items() if wait != NOTHING}
    return {wait: [one / other for one, other in zip(each, alone, strict=True)] for wait, each in others.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, f"{_REPETITIONS}, about a minute in all")
    default, text = sys.getswitchinterval(), "after which a thread may ask another one for the GIL; default %(default)s"
    parser.add_argument("--switch-interval", type=float, default=default, metavar="SECONDS", help=text)


def run(options: argparse.Namespace) -> int:
    # Otherwise a bucket starts in step() only, where the main thread waits itself.
    os.environ["HVLIKE_OVERLAP"] = "1"
    torch.set_num_threads(1)
    sys.setswitchinterval(options.switch_interval)
    if not runs_on_two_ranks("waiting"):
        return 2
    repetitions = options.repetitions or _REPETITIONS
    conditions = {**describe("waiting"), "switch_interval": options.switch_interval}
    bell = open_bell()
    found: dict[str, dict[str, Any]] = {}
    for threads in (FREE, ONE_CORE):
        if threads is ONE_CORE:
            # Another one for each rank.
            cores = sorted(os.sched_getaffinity(0))
            core = cores[hvlike.rank() % len(cores)]
            os.sched_setaffinity(0, {core})
            current().fabric.loop.thread_pool.pin(core)
        seconds = slowdowns(works(), repetitions, options.seed, bell)
        late = latencies(works(), repetitions * _LATENCIES, options.seed, bell)
        found[threads] = {"slowdown": {name: ratios(each) for name, each in seconds.items()}, "latency": late}
    os.close(bell)
    if hvlike.rank() == 0:
        document, text = {**conditions, "results": as_json(found)}, as_text(conditions, found)
        publish(options, document, text, "what waiting costs", panels(found))
    hvlike.shutdown()
    return 0


def as_json(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        threads: {
            "slowdown": {work: with_samples(waits) for work, waits in results["slowdown"].items()},
            "latency": with_samples(results["latency"]),
        }
        for threads, results in found.items()
    }


def as_text(conditions: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    interval = format_seconds(conditions["switch_interval"])
    parts = [f"what waiting costs a rank, {heading(conditions)}\nthe GIL changes hands after {interval}"]
    for threads, results in found.items():
        rows = []
        for work, waits in results["slowdown"].items():
            summaries = (Summary.of(waits[wait]) for wait in _SHOWN)
            rows.append([work, *(with_quartiles(each.median, each, 3) for each in summaries)])
        slowdown = table(["slowdown of", f"waits for {AGAIN}", NAMED, PLANNED], rows)
        late = [[work, *_times(each)] for work, each in results["latency"].items()]
        latency = table(["ended after, main thread in", "median", "quartiles", "worst"], late)
        parts.append(f"{threads}\n{slowdown}\n\n{latency}")
    parts.append(
        "slowdown: time of the main thread's work while its rank waits, to the same work with nothing in flight;\n"
        "median of paired ratios [quartiles]. 'nothing, again' is the noise: twice the same.\n"
        "ended after: from the call of rank 1, which comes late, to the end of a named allreduce of 64 bytes on rank 0."
    )
    return "\n\n".join(parts)


def panels(found: dict[str, dict[str, Any]]) -> list[Bars]:
    drawn = []
    for threads, results in found.items():
        groups = list(results["slowdown"])
        series = {wait: [Summary.of(results["slowdown"][work][wait]) for work in groups] for wait in _SHOWN}
        drawn.append(Bars(threads, "time / time without waiting", groups, series, line=1.0))
    return drawn


def _times(samples: list[float]) -> tuple[str, str, str]:
    summary = Summary.of(samples)
    quartiles = f"{format_seconds(summary.first_quartile)}, {format_seconds(summary.third_quartile)}"
    return format_seconds(summary.median), quartiles, format_seconds(max(samples))
