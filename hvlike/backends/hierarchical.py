"""The hierarchical backend: reduce inside each node, across the nodes, and inside each node again.

    node A   rank 0: chunks a c    rank 1: chunks b d        1. shared reduce-scatter: owners hold the node's sums
                 |                     |                     2. network: equal local ranks reduce theirs across
    node B   rank 2: chunks a c    rank 3: chunks b d        3. shared gather: owners hand the results out

All ranks of a node drive the network at once, each for its own chunks. Where the nodes hold different numbers
of ranks the first rank of each node owns everything and crosses for the others.

What is large goes in waves, and the three steps of different waves at the same time:

    reduce inside   wave 0   wave 1            wave 2            wave 3
    across                   wave 0            wave 1            wave 2
    hand out                          wave 0            wave 1

A node's sum of 16-bit floats is rounded to 16 bits before it crosses: half the bytes, and one more rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import PreparedReduction
from hvlike.backends.network.network import Network, PreparedNetworkReduction
from hvlike.backends.network.partition import Run, messages
from hvlike.backends.shared_memory.leader import FlatBuffer, NodeReduction, SingleRank
from hvlike.backends.shared_memory.schedule import Chunk
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.world import Group


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


SHARD_BYTES = 256 << 10  # What one rank reduces of a wave that crosses: the cost of a message does not count

LEADER_BYTES = 8 << 20
"""Of all ranks of a node together: up to this the first of them crosses for all. The others sleep meanwhile, and each
node sends a few messages instead of a few for each of its ranks."""
CROWDED_LEADER_BYTES = 64 << 20
"""The same where ranks share cores: two hosts with two ranks each on two cores took a third of the time for 16 MiB."""
MOST_KNOWN = 64  # Reductions that are kept; with one more all are prepared anew

_COUNT = Arithmetic(torch.int64, ReduceOp.SUM)


class Wave(NamedTuple):
    tensors: list[torch.Tensor]
    chunks: list[Chunk]  # Who owns what on this node; nothing where this rank is alone on it


class LeaderReduction:
    """See PreparedReduction (base.py)."""

    def __init__(self, node: NodeReduction, across: PreparedNetworkReduction | None, flat: FlatBuffer) -> None:
        """across: reduces the flat buffers of the leaders; None where this rank is none."""
        self._node = node
        self._across = across
        self._flat = flat

    def run(self, addresses: list[int], active: int = 1, tensors: Sequence[torch.Tensor] = ()) -> Coroutine[int]:
        return self._node.run(addresses, active, tensors, self._cross)

    def _cross(self, count: int) -> Coroutine[int]:
        assert self._across is not None
        return self._across.run([self._flat.address], count, [self._flat.bytes])


class HierarchicalBackend:
    """A group on several nodes."""

    name = "HIERARCHICAL"

    def __init__(
        self, group: Group, shared: SharedBackend | None, cross: Network | None, whole: Network, *, crowded: bool
    ) -> None:
        """shared: None on a node with one member; cross: None where another rank crosses for this one.

        crowded: ranks of the job share cores, the same everywhere.
        """
        self._group = group
        self._shared = shared
        self._cross = cross
        self._whole = whole
        self._crowded = crowded
        self._prepared: dict[object, LeaderReduction] = {}
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # Of the leader, for one reduction at a time

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction | None:
        if self._cross is not None and all(len(node) == 1 for node in self._group.nodes):
            return self._cross.prepare(lengths, arithmetic)
        most = CROWDED_LEADER_BYTES if self._crowded else LEADER_BYTES
        if sum(lengths) * arithmetic.itemsize * max(map(len, self._group.nodes)) > most:
            return None
        key = (*lengths, arithmetic.dtype, arithmetic.op, arithmetic.factors)
        if key not in self._prepared:
            if len(self._prepared) >= MOST_KNOWN:
                self._prepared.clear()
            self._prepared[key] = self._by_leader(lengths, arithmetic)
        return self._prepared[key]

    def _by_leader(self, lengths: Sequence[int], arithmetic: Arithmetic) -> LeaderReduction:
        nbytes = sum(lengths) * arithmetic.itemsize
        if len(self._memory) < nbytes:
            with torch.inference_mode(False):
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        flat = FlatBuffer(lengths, arithmetic, self._memory)
        node: NodeReduction = SingleRank(flat, arithmetic)
        if self._shared is not None:
            node = self._shared.by_leader(lengths, arithmetic, flat)
        across = None
        if self._group.local_rank == 0 and self._cross is not None:
            across = self._cross.prepare([sum(lengths)], arithmetic.continuation)
        return LeaderReduction(node, across, flat)

    @property
    def slow(self) -> bool:
        """Whether the network between the nodes was slow in the last large exchange of this rank."""
        return self._cross is not None and self._cross.bandwidth.slow

    def count_active(self, active: int) -> Coroutine[int]:
        count = torch.tensor([active], dtype=torch.int64, device="cpu")
        yield from self.allreduce([count], _COUNT)
        return int(count)

    def allreduce(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Coroutine[None]:
        if self._cross is not None and all(len(node) == 1 for node in self._group.nodes):
            yield from self._cross.allreduce(tensors, arithmetic)
            return
        tensors = [tensor for tensor in tensors if len(tensor)]
        prepared = self.prepare(list(map(len, tensors)), arithmetic) if tensors else None
        if prepared is not None:
            yield from prepared.run(list(map(arithmetic.address, tensors)), True, tensors)
            return
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
                self._prescale(tensors, arithmetic)
            reduced.append(Wave(tensors, chunks))

    def _prescale(self, tensors: Sequence[torch.Tensor], arithmetic: Arithmetic) -> None:
        """On other nodes the contributions are prescaled when they are reduced, so on a node with one member too."""
        for tensor in tensors:
            arithmetic.combine(arithmetic.view(tensor), [], partial=True)

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

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[int], arithmetic: Arithmetic
    ) -> Coroutine[None]:
        """Reduce each tensor on the position `owners[i]`, in place; the others' are only read. In each node the rank
        that crosses with the node of their owner reduces them; they go on from there where it is not the owner.
        """
        crossers = [self._crosser(owner) for owner in owners]
        mine = [index for index, local in enumerate(crossers) if local == self._group.local_rank]
        work = list(tensors)
        for index in mine:
            if owners[index] != self._group.rank:
                # What this rank reduces for others must not appear in their callers' tensors.
                work[index] = tensors[index].clone()
        rest = arithmetic
        if self._shared is not None:
            yield from self._shared.reduce_scatter(work, crossers, arithmetic, partial=True)
            rest = arithmetic.continuation
        elif any(len(node) > 1 for node in self._group.nodes):
            self._prescale([work[index] for index in mine], arithmetic)
            rest = arithmetic.continuation
        if self._cross is not None:
            targets = [self._place_across(owners[index]) for index in mine]
            yield from self._cross.reduce_scatter([work[index] for index in mine], targets, rest)
        if self._shared is not None and not self._group.homogeneous:
            yield from self._hand_out(work, owners)

    def _crosser(self, position: int) -> int:
        """The local rank that crosses for a member, on every node."""
        return self._node_of(position).index(position) if self._group.homogeneous else 0

    def _node_of(self, position: int) -> tuple[int, ...]:
        return next(node for node in self._group.nodes if position in node)

    def _place_across(self, position: int) -> int:
        """The rank, among those that cross with this one, of the node of a member."""
        local = self._group.local_rank
        return sorted(node[local] for node in self._group.nodes).index(self._node_of(position)[local])

    def _hand_out(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        """Bring the tensors from the first rank of the node, which has crossed for all, to their owners."""
        group, shared = self._group, self._shared
        if shared is None:
            return
        owned = [
            [tensor.view(torch.uint8) for tensor, owner in zip(tensors, owners, strict=True) if owner == position]
            for position in group.node
        ]
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        sends, receives = [none] * group.local_size, [none] * group.local_size
        if group.local_rank == 0:
            sends = [none, *(torch.cat(each) if each else none for each in owned[1:])]
            yield from shared.alltoall(sends, receives)
            return
        mine = owned[group.local_rank]
        receives[0] = torch.empty(sum(map(len, mine)), dtype=torch.uint8, device="cpu")
        yield from shared.alltoall(sends, receives)
        for target, part in zip(mine, torch.split(receives[0], [len(each) for each in mine]), strict=True):
            target.copy_(part)

    def gather(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Coroutine[None]:
        yield from self._whole.gather(list(zip(owners, tensors, strict=True)))

    def alltoall(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Coroutine[None]:
        """Send `sends[i]` to position i and fill `receives[i]` from there: through memory first, then the network."""
        sends, receives = list(sends), list(receives)
        if self._shared is not None:
            node = self._group.node
            yield from self._shared.alltoall([sends[each] for each in node], [receives[each] for each in node])
            for each in node:
                sends[each], receives[each] = sends[each][:0], receives[each][:0]
        yield from self._whole.alltoall(sends, receives)

    def close(self) -> None:
        self._whole.close()
        if self._cross is not None:
            self._cross.close()
