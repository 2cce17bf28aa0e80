"""`ProcessGroup`: what torch.distributed makes for the backend "hvlike", and calls for every collective.

torch calls these methods from its Python functions, and from C++ (DDP's reducer, functional collectives) by the names
that PyProcessGroup.hpp lists. Source: torch/csrc/distributed/c10d/ProcessGroup.hpp.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import AnyOp, BitwiseOp, ReduceOp, check_supported
from hvlike.backends.cuda.runtime import KINDS
from hvlike.backends.fusion_buffer import FusionBuffer
from hvlike.backends.op_queue import Job
from hvlike.collectives.requests import collective_jobs
from hvlike.collectives.requests.collective_jobs import PlainAllreduces
from hvlike.collectives.requests.reduction import ScaledOp
from hvlike.collectives.session.context import current
from hvlike.errors import ProcessGroupError, ShutdownError, UsageError
from hvlike.torch_distributed import operations
from hvlike.torch_distributed.autoload import BACKEND_NAME
from hvlike.torch_distributed.groups import close_group, extend_functions, names, open_group, wait_for_members
from hvlike.torch_distributed.recording import recorded
from hvlike.torch_distributed.short_forms import short_form
from hvlike.torch_distributed.store import check_place, start_hvlike
from hvlike.torch_distributed.transfers import Transfers
from hvlike.torch_distributed.work import Work, Works
from hvlike.transport.memory.own_memory import check_memory, first_without, without_memory
from hvlike.untraced import untraced

# Its constructor and methods are bound from C++, with overloads that no class written in Python can repeat.
_ProcessGroupBase: Any = dist.ProcessGroup
_AllgatherOptions: Any = torch._C._distributed_c10d.AllgatherOptions


_Batch = Sequence[Sequence[Tensor]]


@untraced
class ProcessGroup(_ProcessGroupBase):
    """Some ranks of the job as a group of torch.distributed."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, ranks: Sequence[int], name: str, seconds: float) -> None:
        """ranks: of the job, in the order of the group. name: unique in the job. seconds: the timeout of its calls."""
        super().__init__(rank, size)
        self._place = rank
        self._ranks = size
        self._store = store
        self._names = ["", ""]
        self.monitored_barriers = itertools.count()
        self._coalescing: threading.local = threading.local()
        # DDP in a Join context leaves the work of such a call to C++, which would keep only its own half of it.
        self._last_counts: deque[dist.Work] = deque(maxlen=16)
        self.calls = open_group(name, ranks, seconds)
        self._plain = PlainAllreduces(self.calls.queue)
        self._packer = FusionBuffer()
        self.transfers = Transfers(current(), self.calls, ranks)

    # -- collectives ----------------------------------------------------------------------------

    @short_form(dist.AllreduceOptions, 1, "op", "timeout")
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        reduction = _reduction(opts)
        tensor = tensors[0]
        if tensor.is_sparse:
            return self._call(
                "all_reduce", partial(operations.sparse_allreduce, self.calls.group, tensor), tensors, opts
            )
        job = None
        check = partial(self._check_reducible, "all_reduce", tensors, reduction)
        if len(tensors) == 1:
            job = self._plain.job(tensor, reduction, check)
        if job is None:
            check()
            strides = [None] * len(tensors)
            job = partial(collective_jobs.allreduce, self.calls.group, tensors, strides, reduction, self._packer)
        work = self._call("all_reduce", job, tensors, opts, checked=True)
        if tensor.numel() == 1:
            self._last_counts.append(work)
        return work

    allreduce_coalesced = allreduce

    @short_form(dist.ReduceOptions, 1, "root", "op", "timeout")
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        self._check_root("reduce", opts.rootRank)
        reduction = _reduction(opts)
        self._check_reducible("reduce", tensors, reduction)
        job = partial(operations.reduce_to, self.calls.group, tensors, opts.rootRank, reduction)
        return self._call("reduce", job, tensors, opts)

    @short_form(dist.BroadcastOptions, 1, "root", "timeout")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        self._check_root("broadcast", opts.rootRank)
        self._check_writable("broadcast", tensors)
        count = len(tensors)
        job = partial(collective_jobs.broadcast, tensors, [None] * count, [opts.rootRank] * count)
        return self._call("broadcast", job, tensors, opts)

    @short_form(_AllgatherOptions, 2, "timeout")
    def allgather(self, outputs: _Batch, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for row in outputs:
            self._check_count("all_gather", "output tensors", len(row))
        for row, tensor in zip(outputs, inputs, strict=True):
            self._check_own("all_gather", "output", row[self._place], tensor)
        job = partial(collective_jobs.allgather, self.calls.group, outputs, inputs)
        return self._call("all_gather", job, inputs, opts, outputs=outputs[0] if len(outputs) == 1 else outputs)

    def allgather_coalesced(self, output_lists: _Batch, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Write input j of rank i into the list number i, at place j."""
        self._check_count("all_gather_coalesced", "lists of output tensors", len(output_lists))
        for output, tensor in zip(output_lists[self._place], inputs, strict=True):
            self._check_own("all_gather_coalesced", "output", output, tensor)
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        job = partial(collective_jobs.allgather, self.calls.group, columns, inputs)
        return self._call("all_gather_coalesced", job, inputs, opts, outputs=output_lists)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_share("all_gather_into_tensor", output, tensor)
        job = partial(operations.allgather_single, self.calls.group, outputs, inputs)
        return self._call("all_gather_into_tensor", job, inputs, opts, outputs=outputs)

    @short_form(dist.GatherOptions, 2, "root", "timeout")
    def gather(self, outputs: _Batch, inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        self._check_root("gather", opts.rootRank)
        (tensor,) = inputs
        targets = outputs[0] if self._place == opts.rootRank else []
        if self._place == opts.rootRank:
            self._check_count("gather", "output tensors", len(targets))
            self._check_own("gather", "output", targets[self._place], tensor)
        job = partial(operations.gather, self.calls.group, targets, tensor, opts.rootRank)
        return self._call("gather", job, inputs, opts, outputs=targets)

    @short_form(dist.ScatterOptions, 2, "root", "timeout")
    def scatter(self, outputs: Sequence[Tensor], inputs: _Batch, opts: Any) -> dist.Work:
        self._check_root("scatter", opts.rootRank)
        (output,) = outputs
        sources = inputs[0] if self._place == opts.rootRank else []
        if self._place == opts.rootRank:
            self._check_count("scatter", "input tensors", len(sources))
            self._check_own("scatter", "input", sources[self._place], output)
        job = partial(operations.scatter, self.calls.group, output, sources, opts.rootRank)
        return self._call("scatter", job, outputs, opts, also=inputs)

    @short_form(dist.ReduceScatterOptions, 2, "op", "timeout")
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: _Batch, opts: Any = None) -> dist.Work:
        for row, output in zip(inputs, outputs, strict=True):
            self._check_count("reduce_scatter", "input tensors", len(row))
            self._check_own("reduce_scatter", "input", row[self._place], output)
        reduction = _reduction(opts)
        self._check_reducible("reduce_scatter", outputs, reduction)
        job = partial(collective_jobs.reduce_scatter, self.calls.group, outputs, inputs, reduction)
        return self._call("reduce_scatter", job, outputs, opts, also=inputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_share("reduce_scatter_tensor", tensor, output)
        reduction = _reduction(opts)
        self._check_reducible("reduce_scatter_tensor", outputs, reduction)
        rows = [operations.even(each, self._ranks) for each in inputs]
        job = partial(collective_jobs.reduce_scatter, self.calls.group, outputs, rows, reduction)
        return self._call("reduce_scatter_tensor", job, outputs, opts, also=inputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Send tensor number i to rank i; the shapes may differ."""
        self._check_count("all_to_all", "output tensors", len(outputs))
        self._check_count("all_to_all", "input tensors", len(inputs))
        self._check_own("all_to_all", "output", outputs[self._place], inputs[self._place])
        return self._call(
            "all_to_all", partial(collective_jobs.alltoall, outputs, inputs), inputs, opts, outputs=outputs
        )

    @short_form(dist.AllToAllOptions, 4, "timeout", lists=False)
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Send rows to every rank: so many to each, or equally many."""
        sends = self._split("input", tensor.detach(), input_splits)
        receives = self._split("output", output.detach(), output_splits)
        self._check_own("all_to_all_single", "part of the output", receives[self._place], sends[self._place])
        return self._call(
            "all_to_all_single", partial(collective_jobs.alltoall, receives, sends), [tensor], opts, outputs=[output]
        )

    @short_form(dist.BarrierOptions, 0, "timeout")
    def barrier(self, opts: Any = None) -> dist.Work:
        return self._call("barrier", operations.barrier, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        wait_for_members(self, timeout, wait_all_ranks)

    # -- point to point -------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], position: int, tag: int) -> dist.Work:
        with recorded("send", tensors):
            return self._begun(self.transfers.send(tensors, position, tag))

    def recv(self, tensors: Sequence[Tensor], position: int, tag: int) -> dist.Work:
        with recorded("recv", tensors):
            return self._begun(self.transfers.recv(tensors, position, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        with recorded("recv", tensors):
            return self._begun(self.transfers.recv(tensors, None, tag))

    # What torch.distributed called some of them before 2.10.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- what torch.distributed asks of a group ---------------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND_NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupDesc(self) -> str:
        return self._names[1]

    def setGroupDesc(self, description: str) -> None:
        self._names[1] = description

    # Older torch asks its own backends for the names.
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        here = [kind for kind in KINDS if torch.get_device_module(kind).is_available()]
        return [torch.device(kind) for kind in ("cpu", *here)]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.calls.watchdog.made

    def _set_sequence_number_for_group(self) -> None:
        """The calls of the members are numbered from the beginning."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing.works = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalescing.works = self._coalescing.works, None
        return Works(works)

    def abort(self) -> None:
        error = ShutdownError(f"the group {self.calls.name!r} of torch.distributed was aborted on this rank")
        self.calls.end(error)
        self.transfers.end(error)

    def shutdown(self) -> None:
        if self.calls.is_open:
            self.transfers.close()
            close_group(self.calls)

    # -- a call -----------------------------------------------------------------------------------

    def _call(
        self,
        what: str,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        *,
        outputs: Any = None,
        also: Any = (),
        checked: bool = False,
    ) -> dist.Work:
        """Make a call. tensors: that describe it. outputs: its result; None: `tensors`. also: what else it works on.
        checked: all have memory of their own.
        """
        waits, seconds = False, None
        if opts is not None:
            waits = not getattr(opts, "asyncOp", True)  # older torch asks for the work in any case
            given = opts.timeout.total_seconds()
            seconds = given if given > 0 else None
        refused = None if checked else first_without((tensors, outputs or (), also))
        if refused is not None:
            raise without_memory(f"torch.distributed.{what}", refused, ProcessGroupError)
        outputs = list(tensors) if outputs is None else outputs
        with recorded(what, tensors):
            work = self.calls.call(what, job, tensors, outputs, also=also, waits=waits, seconds=seconds)
        return self._begun(work)

    def _begun(self, work: Work) -> dist.Work:
        coalesced = getattr(self._coalescing, "works", None)
        if coalesced is not None:
            coalesced.append(work)
        return work

    def _split(self, which: str, tensor: Tensor, splits: Sequence[int] | None) -> list[Tensor]:
        if not splits:
            if len(tensor) % self._ranks:
                raise self._wrong(
                    "all_to_all_single", f"an {which} whose first dimension divides by {self._ranks}", _like(tensor)
                )
            splits = [len(tensor) // self._ranks] * self._ranks
        self._check_count("all_to_all_single", f"{which} splits", len(splits))
        if sum(splits) != len(tensor):
            raise self._wrong("all_to_all_single", f"{which} splits that add up to {len(tensor)} rows", list(splits))
        return list(torch.split(tensor, list(splits)))

    def _check_count(self, what: str, which: str, count: int) -> None:
        if count != self._ranks:
            raise self._wrong(what, f"{self._ranks} {which}, one for each rank of the group", count)

    def _check_own(self, what: str, which: str, one: Tensor, other: Tensor) -> None:
        if one.numel() != other.numel() or one.dtype != other.dtype:
            raise self._wrong(what, f"{which} {self._place} like the tensor of this rank, {_like(other)}", _like(one))

    def _check_share(self, what: str, whole: Tensor, share: Tensor) -> None:
        if whole.numel() != share.numel() * self._ranks or whole.dtype != share.dtype:
            raise self._wrong(what, f"a tensor {self._ranks} times as large as {_like(share)}", _like(whole))

    def _check_reducible(self, what: str, tensors: Sequence[Tensor], reduction: ScaledOp) -> None:
        """Refuse before it begins what would fail on its way, and end the group."""
        self._check_writable(what, tensors)
        try:
            for tensor in tensors:
                check_supported(reduction.op, tensor.dtype)
        except UsageError as error:
            raise ProcessGroupError(f"torch.distributed.{what}: {error}") from None

    def _check_writable(self, what: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            check_memory(f"torch.distributed.{what}", tensor, ProcessGroupError)
            dimensions = zip(tensor.stride(), tensor.shape, strict=True)
            if tensor.numel() and any(stride == 0 and length > 1 for stride, length in dimensions):
                raise self._wrong(what, "elements that have memory of their own", f"{_like(tensor)}, expanded")

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self._ranks:
            raise self._wrong(what, f"a root among the {self._ranks} ranks of the group", root)

    def _wrong(self, what: str, expected: str, got: object) -> ProcessGroupError:
        return ProcessGroupError(
            f"torch.distributed.{what} on rank {self._place} of the group: expected {expected}, got {got}."
        )


def _like(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


_OPS: dict[str, AnyOp] = {each.name: each for each in (*ReduceOp, *BitwiseOp) if each is not ReduceOp.ADASUM}
_OPS["AVG"] = ReduceOp.AVERAGE
_SUM = ScaledOp(ReduceOp.SUM, 1.0, 1.0)
_known: dict[int, ScaledOp] = {}


def _reduction(opts: Any) -> ScaledOp:
    """What hvlike calls a reduction of torch. Raises: ProcessGroupError for one that it does not have."""
    if opts is None:
        return _SUM
    given = opts.reduceOp.op
    found = _known.get(int(given))
    if found is not None:
        return found
    if given == dist.ReduceOp.PREMUL_SUM and hasattr(opts.reduceOp, "factor"):  # torch 2.7 does not tell the factor
        return ScaledOp(ReduceOp.SUM, float(opts.reduceOp.factor), 1.0)
    op = _OPS.get(given.name)
    if op is None:
        raise ProcessGroupError(
            f"torch.distributed over hvlike has no {given.name} with torch {torch.__version__}; "
            f"it has {', '.join(_OPS)}."
        )
    return _known.setdefault(int(given), ScaledOp(op, 1.0, 1.0))


def create(opts: Any, options: Any = None) -> ProcessGroup:
    """Make a group: the creator that is registered with torch.distributed, with its extended arguments.

    Args:
        opts: torch.distributed's description of the group.
        options: The `pg_options` of the user; hvlike has none.

    Returns:
        The group.

    Raises:
        UsageError, LaunchError: For a rank or a number of ranks that are not those of MPI.
        StalledError: Where members are missing after the timeout.
    """
    world = start_hvlike()
    extend_functions(ProcessGroup)
    ranks = list(opts.global_ranks_in_group)
    if not ranks:
        check_place(opts.group_rank, opts.group_size, world)
        ranks = list(range(world.size))
    name = names().unique(opts.group_id, ranks, default=not opts.global_ranks_in_group)
    return ProcessGroup(opts.store, opts.group_rank, opts.group_size, ranks, name, opts.timeout.total_seconds())
