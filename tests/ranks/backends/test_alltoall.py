"""alltoall between reductions, on every backend."""

from types import ModuleType

import torch
from support.backends.jobs import run

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.transport.loop.coroutine import Coroutine

LENGTHS = {
    "only to the next": lambda source, target: 500_000 if target == source + 1 else 0,
    "several chunks": lambda source, target: 300_000 * (1 + source) + 77 * target,
}


def content(source: int, target: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * source + target)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def pairs(hvd: ModuleType, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What this rank sends to each and what it must receive from each."""
    me, length = hvd.rank(), LENGTHS[kind]
    sends = [content(me, other, length(me, other)) for other in range(hvd.size())]
    return sends, [content(other, me, length(other, me)) for other in range(hvd.size())]


def test_between_reductions_and_gathers(hvd: ModuleType, ranks_per_node: int | None) -> None:
    """They share the staging slots: nothing may be overwritten before it was taken, whoever is ahead."""
    arithmetic = Arithmetic(torch.float32, ReduceOp.SUM)
    for round_number in range(6):
        sends, expected = pairs(hvd, "several chunks" if round_number % 2 else "only to the next")
        receives = [torch.zeros_like(each) for each in expected]
        before = torch.full((200_000 + round_number,), float(hvd.rank()))
        after = torch.full((3 + 150_000 * (round_number % 3),), 1.0)
        shown = torch.full((100_000,), hvd.rank(), dtype=torch.uint8)

        def job(
            backend: Backend,
            before: torch.Tensor = before,
            after: torch.Tensor = after,
            shown: torch.Tensor = shown,
            sends: list[torch.Tensor] = sends,
            receives: list[torch.Tensor] = receives,
        ) -> Coroutine[None]:
            yield from backend.allreduce([before], arithmetic)
            yield from backend.alltoall(sends, receives)
            yield from backend.allreduce([after], arithmetic)
            yield from backend.gather([shown], [hvd.size() - 1])

        run(job)
        assert bool((before == sum(range(hvd.size()))).all())
        assert bool((after == hvd.size()).all())
        assert bool((shown == hvd.size() - 1).all())
        for received, right in zip(receives, expected, strict=True):
            assert torch.equal(received, right)
