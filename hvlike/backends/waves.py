"""Large reductions over several nodes with several ranks each, in waves.

    node A   rank 0: chunks a c    rank 1: chunks b d        1. shared reduce-scatter: owners hold the node's sums
                 |                     |                     2. network: equal local ranks reduce theirs across
    node B   rank 2: chunks a c    rank 3: chunks b d        3. shared gather: owners hand the results out

All ranks of a node drive the network at once, each for its own chunks. Where the nodes hold different numbers
of ranks the first rank of each node owns everything and crosses for the others.

The three steps of different waves go at the same time:

    reduce inside   wave 0   wave 1            wave 2            wave 3
    across                   wave 0            wave 1            wave 2
    hand out                          wave 0            wave 1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.network.network import Network
from hvlike.backends.network.partition import Run, messages
from hvlike.backends.shared_memory.schedule import Chunk
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.world import Group

SHARD_BYTES = 256 << 10  # What one rank reduces of a wave that crosses: the cost of a message does not count


def side_by_side(coroutines: Sequence[Coroutine[None]]) -> Coroutine[None]:
    """Advance all coroutines in turn until the last has ended; when one fails the others are closed."""
    left = list(coroutines)
    try:
        while left:
            wait = Wait.NOTIFY
            for coroutine in list(left):
                step = next(coroutine, None)
                if step is None:
                    left.remove(coroutine)
                    step = Wait.AGAIN
                wait = max(wait, step)
            if left:
                yield wait
    finally:
        for coroutine in left:
            coroutine.close()


class Wave(NamedTuple):
    tensors: list[torch.Tensor]
    chunks: list[Chunk]  # Who owns what on this node; nothing where this rank is alone on it


def prescale(tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> None:
    """On other nodes the contributions are prescaled when they are reduced, so on a node with one member too."""
    for tensor in tensors:
        arithmetic.combine(arithmetic.view(tensor), [], partial=True)


class Waves:
    """One rank's part in them."""

    def __init__(self, group: Group, shared: SharedBackend | None, cross: Network | None) -> None:
        """shared: None on a node with one member; cross: None where another rank crosses for this one."""
        self._group = group
        self._shared = shared
        self._cross = cross

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        """Reduce flat tensors in place."""
        waves = self._waves(tensors, arithmetic)
        reduced: deque[Wave] = deque()
        crossed: deque[Wave] = deque()
        yield from side_by_side(
            [
                self._reduce_inside(waves, reduced, arithmetic),
                self._take_across(len(waves), reduced, crossed, arithmetic),
                self._hand_over(len(waves), crossed),
            ]
        )

    def _waves(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> list[list[torch.Tensor]]:
        crossing = self._group.local_size if self._group.homogeneous else 1
        runs = [Run(piece, 0, len(tensor)) for piece, tensor in enumerate(tensors)]
        wave_bytes = SHARD_BYTES * len(self._group.nodes) * crossing
        cuts = messages(runs, wave_bytes // arithmetic.itemsize)
        return [[tensors[piece][start:stop] for piece, start, stop in each] for each in cuts]

    def _reduce_inside(
        self, waves: Sequence[list[torch.Tensor]], reduced: deque[Wave], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        owner = None if self._group.homogeneous else 0
        for tensors in waves:
            chunks: list[Chunk] = []
            if self._shared is not None:
                chunks = yield from self._shared.reduce_partially(tensors, arithmetic, owner)
            else:
                prescale(tensors, arithmetic)
            reduced.append(Wave(tensors, chunks))

    def _take_across(
        self, count: int, reduced: deque[Wave], crossed: deque[Wave], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        for _ in range(count):
            while not reduced:
                yield Wait.NOTIFY
            wave = reduced.popleft()
            if self._cross is not None:
                yield from self._cross.allreduce(self._own(wave), arithmetic.continuation)
            crossed.append(wave)

    def _own(self, wave: Wave) -> list[torch.Tensor]:
        if not self._group.homogeneous:
            # This rank owns all, and so does one on each other node, however that has cut it.
            return wave.tensors
        return [
            wave.tensors[tensor][start:stop]
            for chunk in wave.chunks
            if chunk.owner == self._group.local_rank
            for tensor, start, stop in chunk.runs
        ]

    def _hand_over(self, count: int, crossed: deque[Wave]) -> Coroutine[None]:
        for _ in range(count):
            while not crossed:
                yield Wait.NOTIFY
            wave = crossed.popleft()
            if self._shared is not None:
                yield from self._shared.gather_chunks(wave.tensors, wave.chunks)
            # The first of the three may go on now, and has had its turn.
            yield Wait.AGAIN
