"""Values as they travel: pickle protocol 5, with tensors and the memory of numpy arrays out of band.

Whatever cannot be in the pickle stream itself is taken, when the stream is read, from the sequence of out-of-band
buffers, in order of appearance: a tensor, the memory of an array, or the message's Incoming (which RRefs need). How
to build that sequence stands in a table behind the stream:

    stream                      the value; tensors are references to "the next buffer"
    memory                      the short pieces, as bytes; long ones go by themselves (tensors.Cargo)
    table, its length, b"T"     only where there is any: one row each (tensors.Row; None: the Incoming; _Ahead;
                                sparse.SparseRow, after the rows of its parts), the lengths of the short pieces, and
                                which rows go to which device
    record, its length, b"S"    instead of these where there is one simple tensor (single.py)
    record, its length, b"B"    the same without a stream: the value is the tensor

RRefs stand in the table themselves: a worker that cannot open the stream, or does not want it any more, still takes
over what the sender keeps alive for it, and lets it go.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from hvlike.rpc.wire import autograd_hooks, single_tensor
from hvlike.rpc.wire import tensors as sparse
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT
from hvlike.rpc.wire.message import Packed
from hvlike.rpc.wire.reducers import REDUCERS, THE_TENSOR, arrived, cloud_pickler, describe_subject, missing_name
from hvlike.rpc.wire.single_tensor import Body, join_parts, pack_tensor, unpack_tensor
from hvlike.rpc.wire.tensors import (
    PARAMETER,
    RAW_MEMORY,
    REQUIRES_GRAD,
    SPARSE_PART,
    ReceivedMemory,
    SparseRow,
    build,
    lay_out,
)

T = TypeVar("T")
NO_MAP: Mapping[torch.device, torch.device] = MappingProxyType({})
_Ahead: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a class of carry_ahead and the numbers of an object."""

_PROTOCOL = 5
_END = struct.Struct("<Ic")
_STOP = pickle.STOP[0]
_TABLE, _SINGLE, _BARE = b"T", b"S", b"B"
_ARRAY_BYTES = 4096
"""Smaller memory of arrays stays in the stream: a message of its own would cost more than two copies."""
_KEEP_BYTES = 1 << 12
"""A pickler is used again after streams up to this size. A longer one leaves it a large memo, to be wiped after every
message from then on: after 100 KiB of small objects that took 50 us each time."""

# As THE_TENSOR.
_THE_INCOMING = pickle.PickleBuffer(bytearray(1))


class Outgoing:
    """One message being built; made by the caller of `pack`.

    destination: rank. cloudpickle: send lambdas and local functions too, by the package cloudpickle. context: that of
    distributed autograd that it belongs to; about: the function that it calls or answers, or what to say of it;
    records: whether gradients may come back for its tensors. device_map: where tensors of GPUs go; what: the message
    in words, for those that have nowhere to go.
    """

    __slots__ = (
        "about",
        "cloudpickle",
        "context",
        "destination",
        "device_map",
        "graded",
        "records",
        "undo",
        "what",
    )

    def __init__(
        self,
        destination: int,
        *,
        cloudpickle: bool = False,
        context: int = NO_CONTEXT,
        about: object = "",
        records: bool = True,
        device_map: Mapping[torch.device, torch.device] = NO_MAP,
        what: str = "Message",
    ) -> None:
        self.destination = destination
        self.cloudpickle = cloudpickle
        self.context = context
        self.about = about
        self.records = records
        self.device_map = device_map
        self.what = what
        self.graded: list[Tensor] = []
        """The tensors of the message that require grad, each once, in order of appearance."""
        self.undo: list[Callable[[], None]] = []
        """Called in reverse order where packing fails."""


class Incoming:
    """One message being opened; made by the caller of `unpack`. source: rank."""

    __slots__ = ("graded", "rrefs", "source")

    def __init__(self, source: int) -> None:
        self.source = source
        self.graded: Sequence[Tensor] = []
        """The received copies of the sender's `Outgoing.graded`, in the same order.

        Leaves that require grad; in a context of distributed autograd, what has come of these.
        """
        self.rrefs: list[Any] = []
        """RRefs met; who restores them puts them here."""


def pack(value: Any, outgoing: Outgoing) -> Packed:
    """Return the value as it travels; its storages are the tensors' own memory, not copies; short ones are copied.

    Functions and classes travel by name. Safe from any number of threads.
    Raises: what pickle raises (AttributeError, PicklingError, TypeError), RuntimeError for a tensor that is not on the
    CPU and for a torch.futures.Future; `outgoing.undo` has then been called.
    """
    try:
        packed = (_pack_bare(value, outgoing) if type(value) is Tensor else None) or _pack_stream(value, outgoing)
        return packed if outgoing.context == NO_CONTEXT else _noted(packed, outgoing)
    except BaseException:
        for undo in reversed(outgoing.undo):
            undo()
        raise


def unpack(packed: Packed, incoming: Incoming) -> Any:
    """Return the value that `pack` was given, its tensors on the received storages without a copy; once a message.

    Raises: RuntimeError where a name of the sender does not exist here, whatever the restoring of an object raises.
    """
    body = packed.body
    if body[-1] == _BARE[0]:
        return _single_arrival(packed, incoming)[0]
    buffers = None if body[-1] == _STOP else _arrivals(packed, incoming)
    if buffers is None and packed.note is not None:
        autograd_hooks.autograd_hooks().came(packed.note, incoming.source, ())
    try:
        return pickle.loads(body, buffers=buffers)
    except (AttributeError, ImportError) as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            # Raised by Python code, such as a __setstate__, and not by pickle's search for a name.
            raise
        raise missing_name(error) from error


def _pack_stream(value: Any, outgoing: Outgoing) -> Packed:
    """A message of any value."""
    if outgoing.cloudpickle:
        return MessagePickler(cloud_pickler).pack(value, outgoing)
    try:
        walk = _idle.pop()
    except IndexError:
        walk = MessagePickler(Pickler)
    packed = walk.pack(value, outgoing)
    if walk.streamed <= _KEEP_BYTES:
        _idle.append(walk)
    return packed


def _pack_bare(tensor: Tensor, outgoing: Outgoing) -> Packed | None:
    """A message that is one simple tensor and nothing else, without a pickler; None: the tensor is not so simple."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    found = pack_tensor(tensor, 0, single_tensor.SHORT_RECORD_BYTES)
    if found is None:
        return None
    record, elements, storage = found
    if tensor.requires_grad:
        outgoing.graded.append(tensor)
    body = join_parts((elements, record, _END.pack(len(record), _BARE)))
    return Packed(body, [] if storage is None else [storage])


def _noted(packed: Packed, outgoing: Outgoing) -> Packed:
    graded = outgoing.graded if outgoing.records else ()
    note = autograd_hooks.autograd_hooks().sent(
        outgoing.context, outgoing.destination, describe_subject(outgoing.about), graded
    )
    return Packed(packed.body, packed.storages, note)


def discard(packed: Packed, incoming: Incoming) -> None:
    """Let a message go unopened: its RRefs are taken over and dropped; no code of the user runs."""
    body = packed.body
    if body and body[-1] == _TABLE[0]:
        _restore_ahead(table_of(body)[0], incoming)


def carry_ahead(
    cls: type[T], reduce: Callable[[T, Outgoing], tuple[int, ...]], restore: Callable[[tuple[int, ...], Incoming], T]
) -> None:
    """Have instances of exactly `cls` travel as numbers that are read before the stream is, and even without it.

    reduce: (object, message being built) -> numbers. restore: (those numbers, message being opened) -> object.
    """

    def travel(walk: MessagePickler, obj: T) -> tuple[Any, ...]:
        numbers = reduce(obj, walk.outgoing)
        walk.ahead[len(walk.items)] = cls.__qualname__, numbers
        return arrived, (_THE_INCOMING,)

    REDUCERS[cls] = travel
    _AHEAD[cls.__qualname__] = restore


def carry(cls: type[T], reduce: Callable[[T, Outgoing], Any], restore: Callable[[Any, Incoming], T]) -> None:
    """Have instances of exactly `cls` travel as what `reduce` returns, and be restored from it by `restore`.

    reduce: (object, message being built) -> any picklable value. restore: (that value, message being opened) -> object,
    a function at module level.
    """

    def travel(walk: MessagePickler, obj: T) -> tuple[Any, ...]:
        return restore, (reduce(obj, walk.outgoing), _THE_INCOMING)

    REDUCERS[cls] = travel


class Pickler(pickle.Pickler):
    """pickle.Pickler, whose instances take attributes."""


class _Chunks:
    """The part of a file that a pickler needs."""

    __slots__ = ("write",)

    def __init__(self, chunks: list[bytes | memoryview]) -> None:
        self.write = chunks.append


class MessagePickler:
    """A pickler's way through a message, and what it finds there that travels beside the stream."""

    outgoing: Outgoing
    streamed: int
    """Bytes of the stream, without what travels beside it."""

    def __init__(self, pickler: Callable[..., Any]) -> None:
        self.items: list[tuple[Tensor, int] | None] = []
        self.ahead: dict[int, _Ahead | SparseRow] = {}
        """The rows of what is no dense tensor, by place."""
        self.originals: dict[int, Tensor] = {}
        """The tensors that travel as others, sparse ones and those of GPUs, by place."""
        self.targets: dict[int, str] = {}
        """The devices that tensors are put on where the message is opened, by place."""
        self._chunks: list[bytes | memoryview] = []
        self._pickler = pickler(_Chunks(self._chunks), _PROTOCOL, buffer_callback=self._keep_in_band)
        theirs = getattr(self._pickler, "reducer_override", None)
        self._pickler.reducer_override = self._reduce if theirs is None else lambda obj: self._reduce(obj, theirs)

    def pack(self, value: Any, outgoing: Outgoing) -> Packed:
        """Walk through one value; after an error the walk is of no more use."""
        self.outgoing = outgoing
        self._pickler.dump(value)
        chunks, items = self._chunks, self.items
        self.streamed = sum(memoryview(chunk).nbytes for chunk in chunks)
        storages: list[Tensor] = []
        if items:
            outgoing.graded += self._graded()
        if (found := self._simple()) is not None:
            record, elements, storage = found
            if storage is not None:
                storages.append(storage)
            chunks += (elements, record, _END.pack(len(record), _SINGLE))
        elif items:
            rows, cargo = lay_out(items)
            storages = cargo.storages
            mixed = [self.ahead.get(place, row) for place, row in enumerate(rows)] if self.ahead else rows
            table = pickle.dumps((mixed, [len(piece) for piece in cargo.short], self.targets or None), _PROTOCOL)
            chunks += (*cargo.short, table, _END.pack(len(table), _TABLE))
            self.ahead.clear()
            self.originals.clear()
            self.targets.clear()
        body: Body = chunks[0] if len(chunks) == 1 else join_parts(chunks)
        # Only now: long elements in the chunks are views of a tensor that these may be the last to hold.
        items.clear()
        chunks.clear()
        self._pickler.clear_memo()
        del self.outgoing
        return Packed(body, storages)

    def _simple(self) -> tuple[bytes, bytes | memoryview, Tensor | None] | None:
        """What record_of makes of the only tensor; None where there are others, or it is not simple."""
        only = self.items[0] if len(self.items) == 1 and not self.targets else None
        return (
            None
            if only is None or only[1] not in (0, PARAMETER)
            else pack_tensor(*only, single_tensor.SHORT_RECORD_BYTES)
        )

    def _graded(self) -> list[Tensor]:
        """The tensors that require grad, those that travel as others too, in order of appearance."""
        originals = self.originals
        tensors = [
            originals.get(place) if item is None or place in originals else item[0]
            for place, item in enumerate(self.items)
        ]
        return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]

    def _reduce(self, obj: Any, otherwise: Callable[[Any], Any] | None = None) -> Any:
        """What the pickler asks for every object that is not a plain number, string or container."""
        reduce = REDUCERS.get(type(obj))
        reduced = NotImplemented if reduce is None else reduce(self, obj)
        return otherwise(obj) if reduced is NotImplemented and otherwise is not None else reduced

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """What the pickler asks for every buffer."""
        if buffer is THE_TENSOR:
            return False
        if buffer is _THE_INCOMING:
            self.items.append(None)
            return False
        memory = buffer.raw()
        if memory.readonly or memory.nbytes < _ARRAY_BYTES:
            return True
        self.items.append((torch.frombuffer(memory, dtype=torch.uint8), RAW_MEMORY))
        return False


_idle: list[MessagePickler] = []
"""Walks to be used again, by any thread."""


def _arrivals(packed: Packed, incoming: Incoming) -> list[Any]:
    """Build what the stream takes as buffers, in order of appearance."""
    if packed.body[-1] == _SINGLE[0]:
        return _single_arrival(packed, incoming)
    rows, pieces, targets = table_of(packed.body)
    ahead = _restore_ahead(rows, incoming)
    hold = ReceivedMemory(pieces, packed.storages)
    arrivals: list[Any] = []
    parts: list[Tensor] = []
    graded: list[int] = []
    for place, row in enumerate(rows):
        if row is None or place in ahead:
            arrivals.append(ahead.get(place, incoming))
            continue
        if isinstance(row[0], str):
            arrival = sparse.assemble_sparse(parts, row)
            parts.clear()
        else:
            arrival = build(row, hold, targets.get(place) if targets else None)
            if row[-1] & SPARSE_PART:
                parts.append(arrival)
                continue
        if row[-1] & REQUIRES_GRAD:
            graded.append(len(arrivals))
        arrivals.append(arrival)
    incoming.graded = [arrivals[place] for place in graded]
    if packed.note is not None:
        incoming.graded = autograd_hooks.autograd_hooks().came(packed.note, incoming.source, incoming.graded)
        for place, tensor in zip(graded, incoming.graded, strict=True):
            arrivals[place] = tensor
    return arrivals


def _single_arrival(packed: Packed, incoming: Incoming) -> list[Any]:
    """The same for a message of one simple tensor."""
    body = packed.body
    length, _ = _END.unpack_from(body, len(body) - _END.size)
    storage = packed.storages[0] if packed.storages else None
    arrivals: Sequence[Tensor] = [unpack_tensor(body, len(body) - _END.size - length, storage)]
    graded = arrivals if arrivals[0].requires_grad else ()
    if packed.note is not None:
        graded = autograd_hooks.autograd_hooks().came(packed.note, incoming.source, graded)
    incoming.graded = graded
    return list(graded or arrivals)


def table_of(body: Body) -> tuple[list[Any], list[bytes], dict[int, str] | None]:
    """The rows of a message, its short pieces of memory, and which rows go to which device."""
    length, _ = _END.unpack_from(body, len(body) - _END.size)
    stop = len(body) - _END.size - length
    rows, lengths, targets = pickle.loads(memoryview(body)[stop:])
    start = stop - sum(lengths)
    pieces = []
    for length in lengths:
        pieces.append(bytes(body[start : start + length]))
        start += length
    return rows, pieces, targets


def _restore_ahead(rows: list[Any], incoming: Incoming) -> dict[int, Any]:
    """The objects that stand in the table, by their place in it."""
    return {
        place: _AHEAD[row[0]](row[1], incoming)
        for place, row in enumerate(rows)
        if row is not None and row[0] in _AHEAD
    }


_AHEAD: dict[str, Callable[[tuple[int, ...], Incoming], Any]] = {}
"""How objects are restored that stand in the table, by the name of their class."""
