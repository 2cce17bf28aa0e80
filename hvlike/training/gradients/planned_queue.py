"""An op queue for one purpose: jobs step after step, with no message between the ranks but the data itself.

    agree()     all ranks say what they take for granted; where it is the same, they get a queue of their own
    run(job)    every rank runs its job of this step on the queue; the order is the same everywhere
    stand_in()  makes the job of a rank that has joined (hvd.join, a Join context): it runs again and again, in the
                loop, until a step has no active rank

A job returns how many ranks were active in it (`Backend.count_active`). `Packing` makes flat tensors of its data:
each large tensor alone, the small ones of an owner together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor

from hvlike.backends.base import Backend, bytes_of
from hvlike.backends.cuda.device_backend import on_device
from hvlike.backends.cuda.runtime import Event, kind_of, runtime_of
from hvlike.backends.fusion_buffer import SMALL_BYTES
from hvlike.backends.op_queue import Job, OpQueue
from hvlike.collectives.controller.tensor_queue import calling_thread
from hvlike.collectives.controller.trace import exposed_wait, recorded
from hvlike.collectives.health.option_watch import ReadOptions
from hvlike.collectives.requests.plan import QueueProposal
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Operand
from hvlike.collectives.requests.request import find_call_site, order_in_memory
from hvlike.collectives.session.context import Context, current, is_running
from hvlike.collectives.session.joined_proxy import CountingJob, JoinedProxy, PersistentOperation, QueueProxy
from hvlike.errors import UsageError
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.world import Group

_shape: Callable[[Tensor], torch.Size] = attrgetter("shape")
_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_is_negative, _is_conjugate = torch.Tensor.is_neg, torch.Tensor.is_conj


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which torch refuses to do at once where a target is a conjugate view."""
    if any(map(_is_negative, targets)) or any(map(_is_conjugate, targets)):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(list(targets), list(sources))


class _Piece(NamedTuple):
    owner: int
    indices: list[int]
    strides: tuple[int, ...] | None = None
    buffer: Tensor | None = None
    views: tuple[Tensor, ...] = ()


class Packing:
    """Packs tensors of the same shapes and dtypes again and again: parameters, their gradients, buffers."""

    def __init__(self, tensors: Sequence[Tensor], owners: Sequence[int], *, row_by_row: bool = False) -> None:
        """`owners`: by tensor, the rank that sends or gets it. Elements go row by row, or in their order in memory."""
        self._shapes, self._dtypes = list(map(_shape, tensors)), list(map(_dtype, tensors))
        self._large: list[_Piece] = []
        small: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
            if tensor.nbytes < SMALL_BYTES:
                small.setdefault((owner, tensor.dtype), []).append(index)
            else:
                self._large.append(_Piece(owner, [index], None if row_by_row else order_in_memory(tensor)))
        self._small = [(owner, indices) for (owner, _), indices in small.items()]
        self._home: torch.device | None = None
        self._pieces = self._made_for(None)
        self.owners = [piece.owner for piece in self._pieces]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(_shape, tensors)) == self._shapes and list(map(_dtype, tensors)) == self._dtypes

    def pack(
        self, tensors: Sequence[Tensor], *, owner: int | None = None, home: torch.device | None = None
    ) -> list[Operand]:
        """Return the pieces with the tensors in them, on `home`; `owner`: copy only the small tensors of that rank."""
        if home != self._home:
            self._home, self._pieces = home, self._made_for(home)
        operands = []
        for piece in self._pieces:
            if piece.buffer is None:
                operands.append(Operand(tensors[piece.indices[0]], piece.strides, home=home))
                continue
            if owner is None or owner == piece.owner:
                torch._foreach_copy_(list(piece.views), [tensors[index].detach() for index in piece.indices])
            operands.append(Operand(piece.buffer, None, home=home))
        return operands

    def unpack(self, tensors: Sequence[Tensor], operands: Sequence[Operand], owners: Collection[int]) -> None:
        for piece, operand in zip(self._pieces, operands, strict=True):
            if piece.owner not in owners:
                continue
            if piece.buffer is None:
                operand.write_back()
            else:
                copy_all([tensors[index].detach() for index in piece.indices], piece.views)

    def _made_for(self, home: torch.device | None) -> list[_Piece]:
        return [self._together(owner, indices, home) for owner, indices in self._small] + self._large

    def _together(self, owner: int, indices: list[int], home: torch.device | None) -> _Piece:
        shapes = [self._shapes[index] for index in indices]
        # An ordinary tensor also in inference mode: later steps may run outside of it.
        with torch.inference_mode(False):
            sizes = [shape.numel() for shape in shapes]
            buffer = torch.empty(sum(sizes), dtype=self._dtypes[indices[0]], device=home or "cpu")
            views = tuple(part.view(shape) for part, shape in zip(torch.split(buffer, sizes), shapes, strict=True))
        return _Piece(owner, indices, None, buffer, views)


IN_ONE_THREAD = (
    "The ranks match them by the order in which they are made, which differs where threads run side by side. Make them "
    "in one thread, in the same order on every rank; then any thread may use them."
)
ADVICE = "Build it with the same arguments on every rank."


def send_bytes(backend: Backend, data: bytes, source: int) -> Coroutine[Any]:
    """Return on all ranks the bytes of the member `source`; those that others pass count for nothing."""
    length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    yield from backend.gather([bytes_of(length)], [source])
    payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    if data and len(data) == len(payload):
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    yield from backend.gather([payload], [source])
    return payload.numpy().data


class PlannedQueue(PersistentOperation):
    def __init__(
        self,
        name: str,
        process_set: ProcessSet | None = None,
        described: Mapping[str, Any] | None = None,
        *,
        advice: str = ADVICE,
        device: torch.device | None = None,
    ) -> None:
        """name: what it is for; numbered at the first `agree`, which all ranks make in the same order.

        described: what must be equal on all ranks, by what it is; shown as str(value). advice: how to make them so.
        device: of the tensors, if that is a GPU: jobs run on its backend, and the current stream waits in `result`.
        """
        super().__init__(name)
        self.stand_in: Callable[[], CountingJob] | None = None  # Called and run in the loop
        self.options: WeakMethod[ReadOptions] | None = None  # What is compared from step to step
        self._purpose = name
        self._process_set = process_set
        self._described = tuple((key, str(value)) for key, value in (described or {}).items())
        self._advice = advice
        self._device = device
        self._kind = "" if device is None else kind_of(device)
        self._ready: list[Event] | None = None  # Of a rank that joins, if the device is a GPU
        self._context: Context | None = None
        self._refusal: UsageError | None = None

    def refuse(self, error: UsageError) -> None:
        self._refusal = error

    @property
    def group(self) -> Group:
        """The ranks that it was agreed among."""
        assert self._set_state is not None
        return self._set_state.group

    def join_begins(self) -> None:
        """Have a name before the first step, so that this rank can follow others that begin it. Local."""
        if self._refusal is None:
            self._enter_running_context()
            if self._set_state is not None:
                self._set_state.proxies.add(self)

    def agree(self) -> None:
        """Open the queue, unless it is there. Collective; blocks. Raises: MismatchError, where `described` differs."""
        if self._refusal is not None:
            raise self._refusal
        self._enter_running_context()
        set_state = self._set_state
        if self.queue is not None or set_state is None:
            return
        set_state.proxies.check_present(self.name)
        proposal = QueueProposal(self._described, self._advice, device=self._kind)
        queue, agreed = self._agree_on_queue("queue", proposal, self._device)
        self.queue, self.serial = queue, agreed.serial
        set_state.proxies.add(self)

    def run(self, job: CountingJob) -> int:
        """Run this rank's job of the next step, and wait for its end; how many ranks were active in it. Collective.

        Raises: the error of the job, or a HorovodInternalError. The queue is lost then; the next step opens another.
        """
        self.agree()
        queue, set_state = self.queue, self._set_state
        assert queue is not None
        assert set_state is not None
        if self._step >= self._look_at:
            self._look_at_options()
        self._step += 1
        set_state.controller.positions.entered[self.name] = self._step

        def run(backend: Backend) -> Coroutine[int]:
            active = yield from job(backend)
            self.served += 1
            return active

        ready = self._tensors_ready()
        work: Job = run if ready is None else on_device(queue, None, run, ready)
        if queue.recorder.on:
            work = recorded(queue.recorder, queue, self.name, {"step": self._step}, [], work)
        # First this: a thread that joins looks at it after it has said so.
        self._in_step = True
        try:
            set_state.proxies.check_present(self.name)
            operation = queue.run(work, drive=ready is None)
            self._running = [operation]
            if not operation.done():
                with exposed_wait(queue, self.name, self._step):
                    self._wait_in_step(self._step, find_call_site())
        finally:
            self._in_step = False
        if operation.error is not None:
            self.close()
        active: int = operation.result()
        if queue.device is not None:
            queue.device.fence()()
        return active

    def _tensors_ready(self) -> list[Event] | None:
        """When the tensors of a step hold their values: those of the current stream. None: they are on the CPU."""
        runtime = runtime_of(self._kind)
        if runtime is None or self._device is None:
            return None
        return [runtime.record(runtime.current_stream(self._device))]

    # -- what a join needs ----------------------------------------------------------------------

    def has_no_more_data(self) -> None:
        self._ready = self._tensors_ready()

    def check_can_join(self) -> None:
        if self.stand_in is None:
            raise UsageError(
                f"{self.name!r} is in use on this rank, and cannot go on without it: a rank that has no more data "
                "cannot join while it exists."
            )

    def proxy(self) -> JoinedProxy:
        queue, serial, stand_in = self.queue, self.serial, self.stand_in
        assert queue is not None
        assert serial is not None
        assert stand_in is not None
        return QueueProxy(queue, serial, stand_in, (self._ready or []) if self._kind else None)

    def adopt(self, queue: OpQueue, agreed: QueueProposal) -> JoinedProxy:
        self.queue, self.serial = queue, agreed.serial
        return self.proxy()

    def _enter_running_context(self) -> None:
        """Belong to the hvlike that runs now; an earlier one has taken its queue with it."""
        if is_running() and current() is self._context:
            return
        self.forget()
        self._context = current()
        set_state = self._set_state = self._context.find_set(self._process_set, self._purpose)
        number = set_state.owner_names.claim(self._purpose, self, IN_ONE_THREAD, calling_thread())
        self.name = f"{self._purpose}.{number}"
        if self.options is not None:
            self.watch_options(self.options)
