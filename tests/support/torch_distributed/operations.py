"""Any collective of torch.distributed as a value: what each rank puts in, how it is called, what must come out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.collectives.inputs import COMPLEX, FLOATS, INTEGERS, LAYOUTS, contribution, leaf, reduced, untouched_beside
from support.torch_distributed.backend import BACKEND
from torch import Tensor

BITWISE = ("BAND", "BOR", "BXOR")
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
"""What is moved and not reduced."""
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX, *NARROW)
FORMS = (torch.clone,) if BACKEND == "gloo" else (*LAYOUTS, leaf)

Done = tuple[Any, list[Tensor], list[Tensor]]
"""The work, the tensors that hold the result, and what they must hold."""


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the operations that torch.distributed defines for the dtype, without those that gloo refuses."""
    if dtype in NARROW or (BACKEND == "gloo" and dtype in (torch.int16, torch.bool)):
        return ()
    if dtype in COMPLEX:
        ops: tuple[str, ...] = ("SUM", "AVG")
    else:
        ops = ("SUM", "PRODUCT", "MIN", "MAX", *(("AVG",) if dtype in FLOATS else BITWISE))
    return tuple(op for op in ops if BACKEND != "gloo" or op not in (*BITWISE, "AVG"))


@dataclass(frozen=True)
class Members:
    """A group, its ranks, and the place of this one among them."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def places(self) -> range:
        return range(self.size)


@dataclass(frozen=True)
class Call:
    """One call; everything about it follows from these values, on every rank alike."""

    kind: str
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: int = 0
    mixed: bool = False
    """Whether each rank has another layout."""
    uneven: bool = False
    """Whether tensors of different ranks have different numbers of rows, where that may be."""
    asynchronous: bool = False
    seed: int = 0

    def run(self, members: Members) -> Done:
        """Begin it on this rank, where autograd would not see it, as programs do with tensors that require grad."""
        with torch.inference_mode() if self.seed % 4 == 0 else torch.no_grad():
            done: Done = getattr(self, self.kind)(members)
        return done

    def check(self, done: Done) -> None:
        """Wait, and compare bits: small whole numbers are exact in every dtype, but averages are rounded."""
        work, results, expected = done
        if work is not None:
            work.wait()
        for got, wanted in zip(results, expected, strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            if self.op == "AVG" and self.dtype not in NARROW:
                torch.testing.assert_close(got, wanted)
            else:
                assert torch.equal(_bytes(got), _bytes(wanted)), f"expected {wanted}, got {got}"
            assert self.dtype in NARROW or untouched_beside(got, got.detach())

    @property
    def torch_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    def root(self, members: Members) -> int:
        return members.ranks[self.seed % members.size]

    def is_root(self, members: Members) -> bool:
        return self.root(members) == members.ranks[members.place]

    def value(self, sender: int, receiver: int = 0) -> Tensor:
        """What `sender` has for `receiver`; all receivers get the same rows where a call has one tensor for all."""
        extra = receiver % 3 if self.uneven and self.shape and self.kind in UNEVEN else 0
        if self.uneven and self.kind == "all_gather":
            extra = sender % 3 if self.shape else 0
        return contribution(
            7 * sender + receiver, (self.shape[0] + extra, *self.shape[1:]) if self.shape else (), self.dtype, self.seed
        )

    def make(self, members: Members, values: Tensor) -> Tensor:
        """The values in this rank's layout."""
        return FORMS[(self.layout + (members.place if self.mixed else 0)) % len(FORMS)](values)

    def empty(self, members: Members, values: Tensor) -> Tensor:
        return self.make(members, torch.zeros_like(values))

    def reduced(self, inputs: Sequence[Tensor]) -> Tensor:
        return reduced("AVERAGE" if self.op == "AVG" else self.op, inputs)

    def options(self, members: Members) -> dict[str, Any]:
        return {"group": members.group, "async_op": self.asynchronous}

    def all_reduce(self, members: Members) -> Done:
        mine = self.make(members, self.value(members.place))
        work = dist.all_reduce(mine, self.torch_op, **self.options(members))
        return work, [mine], [self.reduced([self.value(place) for place in members.places])]

    def reduce(self, members: Members) -> Done:
        mine = self.make(members, self.value(members.place))
        work = dist.reduce(mine, self.root(members), self.torch_op, **self.options(members))
        if self.is_root(members):
            return work, [mine], [self.reduced([self.value(place) for place in members.places])]
        # gloo leaves what it had on the way.
        return (work, [], []) if BACKEND == "gloo" else (work, [mine], [self.value(members.place)])

    def reduce_scatter(self, members: Members) -> Done:
        """Rank i gets the reduction of tensor number i of every rank."""
        parts = [self.value(members.place, place) for place in members.places]
        expected = self.reduced([self.value(place, members.place) for place in members.places])
        output, given = self.empty(members, expected), [self.make(members, each) for each in parts]
        work = dist.reduce_scatter(output, given, self.torch_op, **self.options(members))
        return work, [output, *given], [expected, *parts]

    def reduce_scatter_tensor(self, members: Members) -> Done:
        expected = self.reduced([self.value(place, members.place) for place in members.places])
        output, given = (
            self.empty(members, expected),
            self.joined([self.value(members.place, i) for i in members.places]),
        )
        work = dist.reduce_scatter_tensor(output, given, self.torch_op, **self.options(members))
        return work, [output], [expected]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """One tensor: concatenated, or stacked."""
        return torch.cat(parts) if self.shape and (self.seed % 2 or BACKEND == "gloo") else torch.stack(parts)

    def broadcast(self, members: Members) -> Done:
        mine = self.make(members, self.value(members.place))
        work = dist.broadcast(mine, self.root(members), **self.options(members))
        return work, [mine], [self.value(members.ranks.index(self.root(members)))]

    def all_gather(self, members: Members) -> Done:
        expected = [self.value(place) for place in members.places]
        outputs, mine = [self.empty(members, each) for each in expected], self.make(members, expected[members.place])
        work = dist.all_gather(outputs, mine, **self.options(members))
        return work, [*outputs, mine], [*expected, expected[members.place]]

    def all_gather_into_tensor(self, members: Members) -> Done:
        expected = self.joined([self.value(place) for place in members.places])
        output, mine = torch.zeros_like(expected), self.make(members, self.value(members.place))
        work = dist.all_gather_into_tensor(output, mine, **self.options(members))
        return work, [output], [expected]

    def gather(self, members: Members) -> Done:
        expected = [self.value(place) for place in members.places] if self.is_root(members) else []
        outputs = [self.empty(members, each) for each in expected]
        mine = self.make(members, self.value(members.place))
        work = dist.gather(mine, outputs or None, self.root(members), **self.options(members))
        return work, [*outputs, mine], [*expected, self.value(members.place)]

    def scatter(self, members: Members) -> Done:
        root = members.ranks.index(self.root(members))
        parts = [self.make(members, self.value(root, place)) for place in members.places]
        expected = self.value(root, members.place)
        output, is_root = self.empty(members, expected), self.is_root(members)
        work = dist.scatter(output, parts if is_root else None, self.root(members), **self.options(members))
        return work, [output], [expected]

    def all_to_all(self, members: Members) -> Done:
        sent = [self.make(members, self.value(members.place, place)) for place in members.places]
        expected = [self.value(place, members.place) for place in members.places]
        outputs = [self.empty(members, each) for each in expected]
        return dist.all_to_all(outputs, sent, **self.options(members)), outputs, expected

    def all_to_all_single(self, members: Members) -> Done:
        sent = [torch.atleast_1d(self.value(members.place, place)) for place in members.places]
        came = [torch.atleast_1d(self.value(place, members.place)) for place in members.places]
        splits = ([len(each) for each in came], [len(each) for each in sent]) if self.uneven else ()
        expected = torch.cat(came)
        output = torch.zeros_like(expected)
        work = dist.all_to_all_single(output, torch.cat(sent), *splits, **self.options(members))
        return work, [output], [expected]

    def coalesced(self, members: Members) -> Done:
        """Two calls of one kind as one."""
        calls = [
            Call(name, self.op, self.dtype, self.shape, seed=self.seed + i) for i, name in enumerate(2 * [self.single])
        ]
        with dist.distributed_c10d._coalescing_manager(members.group, async_ops=self.asynchronous) as manager:
            done = [getattr(call, call.kind)(members) for call in calls]
        results, expected = ([each for _, *parts in done for each in parts[index]] for index in range(2))
        return manager if self.asynchronous else None, results, expected

    @property
    def single(self) -> str:
        """The kind of calls that are coalesced."""
        if self.dtype in NARROW or not ops_of(self.dtype):
            return "all_gather_into_tensor"
        kinds = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        return kinds[self.seed % (1 if BACKEND == "gloo" else 3)]

    def all_reduce_coalesced(self, members: Members) -> Done:
        values = [
            [contribution(place, shape, self.dtype, self.seed) for place in members.places]
            for shape in (self.shape, (3,))
        ]
        mine = [each[members.place].clone() for each in values]
        work = dist.all_reduce_coalesced(mine, self.torch_op, **self.options(members))
        return work, mine, [self.reduced(each) for each in values]

    def all_gather_coalesced(self, members: Members) -> Done:
        expected = [[self.value(place), contribution(place, (3,), self.dtype)] for place in members.places]
        outputs = [[torch.zeros_like(each) for each in row] for row in expected]
        work = dist.all_gather_coalesced(outputs, expected[members.place], **self.options(members))
        return work, [each for row in outputs for each in row], [each for row in expected for each in row]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
MOVING = ("broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all", "all_to_all_single")
MOVING += ("coalesced", "all_gather_coalesced")
UNEVEN = ("reduce_scatter", "all_to_all", "all_to_all_single")
