"""The measurements of bench waiting; rank 0 computes and waits, rank 1 sleeps and comes late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import hvlike
from hvlike.bench.waiting_peer import Bell
from hvlike.bench.waiting_work import Work, repeated
from hvlike.collectives.context import current
from hvlike.collectives.request import Request, signature_of
from hvlike.collectives.submission import submit

NOTHING, AGAIN = "nothing", "nothing, again"
NAMED, PLANNED = "a named allreduce", "a bucket of gradients"
WAITS = (NOTHING, AGAIN, NAMED, PLANNED)
IN_SYNCHRONIZE = "(waits in synchronize)"

_WORK_SECONDS = 0.04
_NAME = "bench waiting"
_ELEMENTS = 1 << 18


class Named:
    """An allreduce by name."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(_ELEMENTS)

    def run(self, between: Callable[[], None]) -> None:
        """Start it, do what is to be done while it is in flight, and wait for it."""
        handle = hvlike.allreduce_async_(self._tensor, op=hvlike.Sum, name=_NAME)
        between()
        hvlike.synchronize(handle)


class Planned:
    """A step of a DistributedOptimizer whose only bucket starts in backward."""

    def __init__(self) -> None:
        """Collective: takes the step in which the plan is made."""
        self._parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS))
        self._optimizer = hvlike.DistributedOptimizer(torch.optim.SGD([self._parameter], lr=0.0))
        self.run(lambda: None)

    def run(self, between: Callable[[], None]) -> None:
        """Start it in backward, do what is to be done meanwhile, and wait in step()."""
        self._optimizer.zero_grad()
        loss: Any = self._parameter.sum()
        loss.backward()
        between()
        self._optimizer.step()


def slowdowns(works: Mapping[str, Work], repetitions: int, seed: int, bell: Bell) -> dict[str, dict[str, list[float]]]:
    """Time each work while its rank waits for each of WAITS. Collective; two ranks.

    Returns on rank 0 seconds[work][wait], one value a repetition; the others sleep and return nothing.
    """
    operations: dict[str, Named | Planned] = {NAMED: Named(), PLANNED: Planned()}
    order = random.Random(seed)
    long = {name: repeated(work, _WORK_SECONDS) for name, work in works.items()} if hvlike.rank() == 0 else {}
    seconds: dict[str, dict[str, list[float]]] = {name: {wait: [] for wait in WAITS} for name in long}
    for _ in range(repetitions):
        for name in works:
            for wait in order.sample(WAITS, len(WAITS)):
                if hvlike.rank() == 0:
                    seconds[name][wait].append(_timed(long[name], operations.get(wait), bell))
                elif wait in operations:
                    bell.wait()
                    operations[wait].run(lambda: None)
    return seconds


def _timed(work: Work, operation: Named | Planned | None, bell: Bell) -> float:
    """Seconds of the work with an operation in flight for which rank 1 is let come only afterwards."""
    taken = [0.0]

    def timed() -> None:
        # What starting costs is no matter of waiting: the background thread has picked it up and sleeps by now.
        time.sleep(0.005)
        start = time.perf_counter()
        work()
        taken[0] = time.perf_counter() - start
        if operation is not None:
            bell.ring()

    if operation is None:
        timed()
    else:
        operation.run(timed)
    return taken[0]


def latencies(works: Mapping[str, Work], repetitions: int, seed: int, bell: Bell) -> dict[str, list[float]]:
    """Time from the call of rank 1, which comes late, to the end of the operation on rank 0. Collective; two ranks.

    Rank 0 computes meanwhile, or waits in synchronize. Returns on rank 0 the seconds of each repetition.
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
                bell.wait()
                time.sleep(late)
                moments.append(time.monotonic())
                _begin(tensor, lambda request: None).result()
        everybody: list[list[float]] = hvlike.allgather_object(moments, name=f"{_NAME}: moments")
        found[name] = [ended - called for ended, called in zip(*everybody, strict=True)]
    return found


def _begin(tensor: torch.Tensor, finish: Callable[[Request], float | None]) -> hvlike.Handle:
    """An allreduce by name, as allreduce_async_ starts it; finish is called in the loop when it ends."""
    signature = signature_of("allreduce", [tensor], op=int(hvlike.Sum))
    membership = current().membership(None, "Allreduce")
    # Rank 1 waits at once, as in allreduce_(); on rank 0 the background thread shall take it up.
    return submit(membership, signature, _NAME, [tensor], finish, wake=hvlike.rank() == 0)


def _completion(tensor: torch.Tensor, work: Work | None, bell: Bell) -> float:
    """Start the operation, compute until it has ended, and return when that was."""
    handle = _begin(tensor, lambda request: time.monotonic())
    time.sleep(0.001)
    bell.ring()
    while work is not None and not handle.done():
        work()
    moment: float = handle.result()
    return moment


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Each wait's seconds to those of waiting for nothing, within a repetition."""
    alone = seconds[NOTHING]
    return {
        wait: [one / other for one, other in zip(each, alone, strict=True)]
        for wait, each in seconds.items()
        if wait != NOTHING
    }
