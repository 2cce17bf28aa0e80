"""torch.distributed over hvlike: for libraries that gather metrics, broadcast objects or save checkpoints with it.

Every collective returns when it is done: the work that torch.distributed returns for async_op=True is complete. As
with every backend of torch.distributed, all ranks make the same calls in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allgather import allgather
from hvlike.collectives.api.allreduce import allreduce_
from hvlike.collectives.api.alltoall import alltoall
from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.broadcast import broadcast_
from hvlike.collectives.api.reducescatter import reducescatter
from hvlike.collectives.session import basics
from hvlike.errors import UsageError

BACKEND_NAME = "hvlike"  # The name of this backend in torch.distributed

# Its constructor and methods are bound from C++, with overloads that no class written in Python can repeat.
_ProcessGroupBase: Any = dist.ProcessGroup
_c10d: Any = torch._C._distributed_c10d

_groups = itertools.count()


class ProcessGroup(_ProcessGroupBase):
    """All ranks of hvlike as a group of torch.distributed, which makes it on all ranks.

    Methods get what torch.distributed's functions pass to a backend: lists of tensors, and options.
    Source: torch/csrc/distributed/c10d/ProcessGroup.hpp.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place = rank
        self._ranks = size
        self._prefix = f"torch.distributed.{next(_groups)}"
        self._calls = itertools.count()

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)
        for tensor in tensors:
            allreduce_(tensor.detach(), op=op, name=self._name())
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Reduce each tensor over the ranks, in place on the root. Those of other ranks stay as they are."""
        op = _op(opts)
        for tensor in tensors:
            reduced = allreduce_(tensor.detach().clone(), op=op, name=self._name())
            if self._place == opts.rootRank:
                tensor.detach().copy_(reduced)
        return _done(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            broadcast_(tensor.detach(), opts.rootRank, name=self._name())
        return _done(tensors)

    def allgather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for outputs, tensor in zip(output_tensors, input_tensors, strict=True):
            _fill(outputs, allgather(tensor.detach().reshape(-1), name=self._name()))
        return _done(output_tensors)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        _fill([output], allgather(tensor.detach().reshape(-1), name=self._name()))
        return _done([output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Put input number j of rank i into the list number i, at place j."""
        return self.allgather([list(column) for column in zip(*output_lists, strict=True)], inputs)

    def gather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        (tensor,) = input_tensors
        rows = self._exchange(tensor, {opts.rootRank: tensor.numel()})
        if self._place == opts.rootRank:
            _fill(output_tensors[0], rows)
        return _done(output_tensors)

    def scatter(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]], opts: Any
    ) -> dist.Work:
        (output,) = output_tensors
        if self._place == opts.rootRank:
            rows = self._exchange(_flat(input_tensors[0]), dict.fromkeys(range(self._ranks), output.numel()))
        else:
            rows = self._exchange(output.new_empty(0), {})
        _fill([output], rows)
        return _done(output_tensors)

    def reduce_scatter(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            self.reduce_scatter_single(output, _flat(inputs), opts)
        return _done(output_tensors)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        parts = tensor.detach().reshape(self._ranks, -1)
        _fill([output], reducescatter(parts, op=_op(opts), name=self._name()).reshape(-1))
        return _done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _done(outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Send tensor number i to rank i; the shapes may differ."""
        splits = {place: tensor.numel() for place, tensor in enumerate(inputs)}
        _fill(outputs, self._exchange(_flat(inputs), splits))
        return _done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Send rows to every rank: so many to each, or equally many."""
        row = tensor[0].numel() if len(tensor) else 0
        rows = input_splits or [len(tensor) // self._ranks] * self._ranks
        _fill([output], self._exchange(tensor, {place: count * row for place, count in enumerate(rows)}))
        return _done([output])

    def barrier(self, opts: Any = None) -> dist.Work:
        barrier()
        return _done([])

    def send(self, *arguments: Any) -> dist.Work:
        """Raises UsageError: hvlike has collectives only."""
        raise UsageError(
            "torch.distributed over hvlike has collectives only: no send, recv or batch_isend_irecv. Use hvlike.rpc, "
            "or hvlike.alltoall with splits."
        )

    recv = recv_anysource = send

    # What torch.distributed called some of them before 2.10.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _name(self) -> str:
        """Return a name for the next call: calls of this group are matched by their order."""
        return f"{self._prefix}.{next(self._calls)}"

    def _exchange(self, tensor: Tensor, splits: dict[int, int]) -> Tensor:
        """Send elements to some ranks, as many as `splits` says, and return those that came, in rank order."""
        counts = [splits.get(place, 0) for place in range(self._ranks)]
        rows: Any = alltoall(tensor.detach().reshape(-1), counts, name=self._name())
        came: Tensor = rows[0]
        return came


def _fill(outputs: Sequence[Tensor], elements: Tensor) -> None:
    parts = torch.split(elements, [output.numel() for output in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.detach().copy_(part.view(output.shape))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _done(result: object) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = _c10d._create_work_from_future(future)
    return work


_OPS = {each.name: each for each in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)}
_OPS["AVG"] = ReduceOp.AVERAGE


def _op(opts: Any) -> ReduceOp:
    """Return hvlike's name of a reduction. Raises: UsageError for one that it does not have."""
    if opts is None:
        return ReduceOp.SUM
    for name, op in _OPS.items():
        if opts.reduceOp == getattr(dist.ReduceOp, name):
            return op
    raise UsageError(f"torch.distributed over hvlike reduces by SUM, AVG, MIN, MAX or PRODUCT, not by {opts.reduceOp}.")


def init_process_group() -> None:
    """Start torch.distributed over all ranks of hvlike, and hvlike if it is not initialised.

    torch.distributed's collectives, of tensors and of objects, then go through hvlike: no MASTER_ADDR, no rendezvous,
    no second network. Groups (torch.distributed.new_group) have all ranks; there is no send and no recv. Does nothing
    if that is done already. torch.distributed.destroy_process_group ends it.
    Collective: every rank calls it. Blocks until all have.

    Raises:
        UsageError: Where torch.distributed runs with another backend.
        LaunchError: As hvlike.init.

    Example:
        >>> init_process_group()
        >>> torch.distributed.all_reduce(tensor)

    Source: torch.distributed.init_process_group.
    """
    basics.init()
    if dist.is_initialized():
        if dist.get_backend() != BACKEND_NAME:
            raise UsageError(
                f"torch.distributed runs with the backend {dist.get_backend()!r} already. Call hvlike's "
                "init_process_group() first, or torch.distributed.destroy_process_group() before it."
            )
        return
    if not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND_NAME, store=_NO_STORE, rank=basics.rank(), world_size=basics.size())


# torch types its methods one by one; here they are all the same.
_StoreBase: Any = Store


class NoStore(_StoreBase):
    """torch.distributed asks for a store. Every use raises: another backend would wait in it for half an hour."""

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise UsageError(
            "torch.distributed over hvlike has no store, which a group with another backend (gloo, nccl) needs. Use "
            "the default group, or start torch.distributed by its own means and without hvlike."
        )

    set = get = add = wait = check = append = compare_set = multi_set = multi_get = _refuse


# Kept here: torch keeps only the part of it that is not Python.
_NO_STORE = NoStore()


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    if size != basics.size():
        raise UsageError(
            f"torch.distributed over hvlike has groups of all {basics.size()} ranks only, got one of {size}. For "
            "some of the ranks use hvlike.add_process_set."
        )
    return ProcessGroup(rank, size)
