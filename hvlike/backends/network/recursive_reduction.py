"""Reductions level by level, for more ranks than should all send to each other; cost_model.py names the ways.

Six ranks, levels of 2 and 3; what rank 0 holds:

    whole        0+1 of all elements          (0+1)+(2+3)+(4+5) of all
    in shards    0+1 of the first half        (0+1)+(2+3)+(4+5) of the first sixth       the first half       all

Where the number of ranks has a large prime factor, the first even ranks each give what they have to the next rank, and
get the result from there. All is packed into one buffer; 16-bit floats are float32 there, and rounded once.

The first message to a rank at a level begins with the stamp of the reduction, and with how many ranks are active among
those whose sum it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic, Piece
from hvlike.backends.arithmetic.kernels import ordinary_tensor
from hvlike.backends.network.cost_model import Way, members
from hvlike.backends.network.pairwise_reduction import (
    CONTRIBUTION_TAG,
    FIRST_BYTES,
    HEADER,
    give_up,
    open_header,
    split,
)
from hvlike.backends.network.partition import fold
from hvlike.backends.network.progress import SharedScratch
from hvlike.errors import MismatchError
from hvlike.transport.loop.coroutine import Coroutine, Wait, complete
from hvlike.transport.memory.dtypes import Array, Kind, runs_at

_REST_TAG, _RESULT_TAG = 5, 6


class Step(NamedTuple):
    """A level as one rank sees it."""

    group: list[int]  # The ranks in the order in which they are added; this one is among them
    parts: list[tuple[int, int]]  # Of each of them: the elements, start to stop, whose sum it has afterwards
    position: int  # Of this rank in the group


def partner_of(rank: int, size: int) -> int | None:
    """The other rank of a pair of which one, the even one, takes no part in the levels."""
    return rank ^ 1 if rank < 2 * (size - members(size)) else None


def steps_of(rank: int, size: int, elements: int, way: Way) -> list[Step]:
    """The levels of a rank that takes part in them."""
    extra = size - members(size)
    place = rank // 2 if rank < 2 * extra else rank - extra
    found: list[Step] = []
    stride, start, stop = 1, 0, elements
    for radix in way.levels:
        position = place // stride % radix
        places = [place + (each - position) * stride for each in range(radix)]
        group = [2 * each + 1 if each < extra else each + extra for each in places]
        ends = [start + (stop - start) * each // radix for each in range(radix + 1)]
        parts = list(pairwise(ends)) if way.sharded else [(start, stop)] * radix
        found.append(Step(group, parts, position))
        start, stop = parts[position]
        stride *= radix
    return found


class Slot:
    """Elements of a sum, and the message with which they travel."""

    def __init__(self, arithmetic: Arithmetic, memory: Array, payload: Array, *, together: bool) -> None:
        """memory: of the first message, a header; together: the payload follows it there, else in its own message."""
        self.memory = memory
        self.payload = payload
        self.first = memory[: HEADER.size + together * len(payload)]
        self.piece = arithmetic.over(payload)


Messages = list[tuple[int, Slot]]  # To or from these ranks


class Level(NamedTuple):
    sends: Messages
    receives: Messages
    pieces: list[Piece]  # What the group adds, in order


class RecursiveReduction:
    """Reduces tensors of the same lengths each time. All ranks prepare and run the same, in the same order."""

    def __init__(
        self,
        comm: Any,
        byte: Any,
        arithmetic: Arithmetic,
        lengths: Sequence[int],
        stamp: int,
        ranks: Sequence[int],
        way: Way,
        scratch: SharedScratch,
    ) -> None:
        """comm: of mpi4py, with errors that raise; byte: its datatype of bytes. stamp: of this reduction, the same on
        every rank. ranks: the names of the communicator's, for errors. way: as `choose` says, the same on every rank.
        scratch: where sums are kept while this runs.
        """
        self._scratch, self._slots = scratch, 0
        self._comm, self._byte = comm, byte
        self._rank, size = comm.Get_rank(), comm.Get_size()
        self._stamp = stamp
        self._ranks = ranks
        self._arithmetic = arithmetic
        self._half = arithmetic.element.kind is Kind.HALF
        self._wide = arithmetic.on(torch.float32) if self._half else arithmetic
        self._lengths = lengths
        itemsize = arithmetic.itemsize
        self._runs = [(tensor, 0, length * itemsize) for tensor, length in enumerate(lengths)]
        elements = sum(lengths)
        self._together = not way.sharded and HEADER.size + elements * self._wide.itemsize <= FIRST_BYTES
        self._flat = current = self._slot(elements)
        self._partner = partner_of(self._rank, size)
        self._gives = self._partner is not None and self._rank % 2 == 0
        self._levels: list[Level] = []
        self._steps: list[Step] = []
        if not self._gives:
            if self._partner is not None:
                taken = self._slot(elements)
                self._levels.append(Level([], [(self._partner, taken)], [taken.piece, current.piece]))
                current = taken
            self._steps = steps_of(self._rank, size, elements, way)
            for step in self._steps:
                current = self._add_level(step, current, sharded=way.sharded)
        self._sum = current
        self._result = self._flat if way.sharded else current  # Of all elements
        self._inputs, self._outputs = self._cut(self._flat), self._cut(self._result)
        self._places: list[Any] = []  # The tensors
        self._addresses: list[int] | None = None
        self._active = 0  # How many ranks are, among those whose sum this rank holds
        self._requests: list[Any] = []
        self._told: set[int] = set()  # To these ranks this one has sent the first message

    def run(self, addresses: list[int], active: int) -> Coroutine[int]:
        """Reduce the tensors that begin at these addresses, in place; returns how many ranks are active.

        Raises: MismatchError where another rank reduces something else at this point.
        """
        self._locate(addresses)
        if self._half:
            self._copy(self._inputs, self._places)
        else:
            np.concatenate(self._places, out=self._flat.payload)
        if self._wide.factors.prescale != 1:
            self._wide.combine(self._flat.piece, [], partial=True)
        self._active = active
        self._told.clear()
        try:
            yield from self._give() if self._gives else self._reduce()
        except MismatchError:
            self._requests += give_up(self._comm, self._byte, self._told)
            raise
        self._copy(self._places, self._outputs)
        return self._active

    def requests(self) -> Iterable[Any]:
        """Those of MPI that are in flight."""
        return self._requests

    def _give(self) -> Coroutine[None]:
        assert self._partner is not None
        yield from self._exchange([(self._partner, self._flat)], [])
        self._active = 0
        yield from self._exchange([], [(self._partner, self._flat)])

    def _reduce(self) -> Coroutine[None]:
        rest = self._wide.continuation
        for level in self._levels:
            yield from self._exchange(level.sends, level.receives)
            fold(level.pieces, rest.fold)
            # It has worked, and was not held up: whoever drives tells that by this.
            yield Wait.AGAIN
        rest.end(self._sum.piece, self._sum.piece)
        if self._result is not self._sum:
            yield from self._gather()
        if self._partner is not None:
            yield from self._exchange([(self._partner, self._result)], [])

    def _gather(self) -> Coroutine[None]:
        """Bring the shards together, level by level."""
        itemsize, flat, comm, byte = self._wide.itemsize, self._result.payload, self._comm, self._byte
        start, stop = self._steps[-1].parts[self._steps[-1].position]
        np.copyto(flat[start * itemsize : stop * itemsize], self._sum.payload)
        for step in reversed(self._steps):
            places = [flat[start * itemsize : stop * itemsize] for start, stop in step.parts]
            others = [(peer, place) for peer, place in zip(step.group, places, strict=True) if peer != self._rank]
            mine = [places[step.position], byte]
            self._requests = [comm.Irecv([place, byte], peer, _RESULT_TAG) for peer, place in others]
            self._requests += [comm.Isend(mine, peer, _RESULT_TAG) for peer, _ in others]
            yield from complete(self._requests)

    def _exchange(self, sends: Messages, receives: Messages) -> Coroutine[None]:
        comm, byte = self._comm, self._byte
        firsts = [comm.Irecv([slot.memory, byte], peer, CONTRIBUTION_TAG) for peer, slot in receives]
        self._requests = requests = [*firsts]
        if not self._together:
            requests += [comm.Irecv([slot.payload, byte], peer, _REST_TAG) for peer, slot in receives]
        for peer, slot in sends:
            self._told.add(peer)
            HEADER.pack_into(slot.memory.data, 0, self._stamp, self._active)
            requests.append(comm.Isend([slot.first, byte], peer, CONTRIBUTION_TAG))
            if not self._together:
                requests.append(comm.Isend([slot.payload, byte], peer, _REST_TAG))
        # What follows the header of another reduction need not have the length that is expected.
        yield from complete(firsts)
        for peer, slot in receives:
            self._active += open_header(slot.memory, self._stamp, self._ranks[peer], self._ranks[self._rank])
        yield from complete(requests)

    # -- memory ---------------------------------------------------------------------------------

    def _slot(self, elements: int) -> Slot:
        nbytes = elements * self._wide.itemsize
        memory = self._scratch.take(2 * self._slots, FIRST_BYTES)
        payload = memory[HEADER.size :][:nbytes]
        # Also where it is not needed: the numbers of buffers follow from the number of slots.
        rest = self._scratch.take(2 * self._slots + 1, 0 if self._together else nbytes)
        self._slots += 1
        payload = payload if self._together else rest
        return Slot(self._wide, memory, payload, together=self._together)

    def _add_level(self, step: Step, held: Slot, *, sharded: bool) -> Slot:
        """Returns the slot that has the sum after this level."""
        first = step.parts[0][0]
        itemsize = self._wide.itemsize
        sends, receives, slots = [], [], []
        for peer, (start, stop) in zip(step.group, step.parts, strict=True):
            part = held
            if sharded:
                payload = held.payload[(start - first) * itemsize : (stop - first) * itemsize]
                part = Slot(self._wide, self._flat.memory, payload, together=False)
            if peer == self._rank:
                slots.append(part)
                continue
            sends.append((peer, part))
            start, stop = step.parts[step.position]
            slots.append(self._slot(stop - start))
            receives.append((peer, slots[-1]))
        self._levels.append(Level(sends, receives, [each.piece for each in slots]))
        return slots[0]

    def _cut(self, slot: Slot) -> list[Any]:
        """The tensors' parts of a slot; to copy 16-bit floats there and back is to widen and to round them."""
        whole = ordinary_tensor(slot.payload, torch.float32) if self._half else slot.payload
        itemsize = 1 if self._half else self._arithmetic.itemsize
        return split(whole, [range(length * itemsize) for length in self._lengths])

    def _locate(self, addresses: list[int]) -> None:
        if addresses == self._addresses:
            return
        self._places = runs_at(addresses, self._runs)
        if self._half:
            self._places = [self._arithmetic.over(each) for each in self._places]
        self._addresses = addresses[:]

    def _copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            if self._half:
                target.copy_(source)
            else:
                target[:] = source
