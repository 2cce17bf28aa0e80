"""The hierarchical backend: reduce inside each node, across the nodes, and inside each node again.

    one rank on each node    the network alone
    small                    the first rank of each node crosses for all of it (LeaderReduction)
    large                    all ranks of a node cross at once, each for its own chunks (waves.py)

A node's sum of 16-bit floats is rounded to 16 bits before it crosses: half the bytes, and one more rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import PreparedReduction, bytes_of
from hvlike.backends.fusion_buffer import PackedReduction
from hvlike.backends.network.network import Network, PreparedNetworkReduction
from hvlike.backends.shared_memory.leader import FlatBuffer, NodeReduction, SingleRank
from hvlike.backends.shared_memory.shared_backend import SharedBackend
from hvlike.backends.waves import Waves, prescale
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group

LEADER_BYTES = 8 << 20
"""Of all ranks of a node together: up to this the first of them crosses for all. The others sleep meanwhile, and each
node sends a few messages instead of a few for each of its ranks."""
CROWDED_LEADER_BYTES = 64 << 20
"""The same where ranks share cores: two hosts with two ranks each on two cores took a third of the time for 16 MiB."""
MOST_KNOWN = 64  # Reductions that are kept; with one more all are prepared anew

_COUNT = Arithmetic(torch.int64, ReduceOp.SUM)


class LeaderReduction:
    """See PreparedReduction (base.py)."""

    def __init__(self, node: NodeReduction, across: PreparedNetworkReduction | None, flat: FlatBuffer) -> None:
        """across: reduces the flat buffers of the leaders; None where this rank is none."""
        self._node = node
        self._across = across
        self._flat = flat

    def run(self, addresses: list[int], active: int | None, tensors: Sequence[torch.Tensor]) -> Coroutine[int]:
        return self._node.run(addresses, 1 if active is None else active, tensors, self._cross)

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
        self._in_waves = Waves(group, shared, cross)
        self._prepared: dict[object, PreparedReduction] = {}
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # Of the leader, for one reduction at a time

    def prepare(self, lengths: Sequence[int], arithmetic: Arithmetic) -> PreparedReduction:
        if self._cross is not None and all(len(node) == 1 for node in self._group.nodes):
            return self._cross.prepare(lengths, arithmetic)
        key = (*lengths, arithmetic.dtype, arithmetic.op, arithmetic.factors)
        if key not in self._prepared:
            if len(self._prepared) >= MOST_KNOWN:
                self._prepared.clear()
            most = CROWDED_LEADER_BYTES if self._crowded else LEADER_BYTES
            if sum(lengths) * arithmetic.itemsize * max(map(len, self._group.nodes)) > most:
                self._prepared[key] = PackedReduction(self, self._in_waves.allreduce, arithmetic)
            else:
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
        tensors = [tensor for tensor in tensors if len(tensor)]
        if tensors:
            prepared = self.prepare(list(map(len, tensors)), arithmetic)
            yield from prepared.run(list(map(arithmetic.address, tensors)), None, tensors)

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
            prescale([work[index] for index in mine], arithmetic)
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
            [bytes_of(tensor) for tensor, owner in zip(tensors, owners, strict=True) if owner == position]
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
