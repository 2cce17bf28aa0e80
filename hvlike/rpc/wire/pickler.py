"""Values as they travel: pickle protocol 5, with tensors and the memory of numpy arrays out of band, and functions and
classes by name.

Whatever cannot be in the pickle stream is taken, while the stream is read, from the sequence of out-of-band buffers, in
order of appearance: a tensor, the memory of an array, or an RRef. A table behind the stream says how to build that
sequence:

    stream                      the value; tensors are references to "the next buffer"
    memory                      the short pieces, as bytes; long ones go by themselves (tensors.SentMemory)
    table, its length, b"T"     only if there are items: one row each (tensors.Row; _Ahead; tensors.SparseRow, after the
                                rows of its parts), the lengths of the short pieces, and which rows go to which device
    tensors, their start, b"S"  instead of both if there are only simple tensors (tensors.pack_simple)
    tensor, 0, b"B"             the same without a stream: the value is one simple tensor

RRefs stand in the table itself: a worker that cannot open the stream, or does not want it any more, still takes over
what the sender keeps alive for it, and releases it.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from hvlike.errors import RpcError, UsageError
from hvlike.rpc.wire import tensors
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, autograd_hooks
from hvlike.rpc.wire.devices import target_device
from hvlike.rpc.wire.message import Packed, describe_subject
from hvlike.rpc.wire.tensors import (
    NAMES,
    PARAMETER,
    RAW_MEMORY,
    REQUIRES_GRAD,
    SPARSE_LAYOUTS,
    SPARSE_PART,
    Body,
    SimpleTensors,
    SparseRow,
    is_dense,
    join_parts,
    pack_simple,
    split_sparse,
    unpack_simple,
)
from hvlike.transport.memory.own_memory import has_memory, stand_in, without_memory

T = TypeVar("T")
_Ahead: TypeAlias = tuple[str, tuple[int, ...]]  # The name of a class of carry_ahead, and the numbers of an object
_PROTOCOL = 5
_END = struct.Struct("<Qc")
_STOP = pickle.STOP[0]
_TABLE, _SIMPLE, _BARE = b"T", b"S", b"B"
_IS_SIMPLE = _SIMPLE + _BARE
_ARRAY_BYTES = 4096  # Smaller arrays stay in the stream: sending one by itself costs more than two copies
# Stands for "the next buffer" in the stream. Writable: for read-only memory pickle adds an opcode.
THE_TENSOR = pickle.PickleBuffer(bytearray(1))
_KEEP_BYTES = 1 << 12
"""A pickler is used again after streams up to this size. A longer stream leaves it a large memo that is wiped after
every later message: 50 us each time after 100 KiB of small objects."""


@dataclass(eq=False, slots=True)
class Outgoing:
    """One message being packed."""

    destination: int  # Rank of the receiver
    cloudpickle: bool = False  # Send lambdas and local functions too, with the package cloudpickle
    context: int = NO_CONTEXT  # Id of the autograd context that the message belongs to
    about: object = ""  # The function that it calls or answers, or words; for reports
    records: bool = True  # Whether gradients may come back for its tensors
    device_map: Mapping[torch.device, torch.device] = field(default_factory=dict)  # Where GPU tensors go
    what: str = "Message"  # The message in words, for the error about a GPU tensor that has nowhere to go
    graded: list[Tensor] = field(default_factory=list)  # Its tensors that require grad, each once, in order
    undo: list[Callable[[], None]] = field(default_factory=list)  # Called in reverse order if packing fails


@dataclass(eq=False, slots=True)
class Incoming:
    """One message being opened."""

    source: int  # The sender's rank
    session: Any = None  # To which the RRefs belong; it may be over by now
    rrefs: list[Any] = field(default_factory=list)  # The RRefs in the message; what restores them adds them


def pack(value: Any, outgoing: Outgoing) -> Packed:
    """Return the value as it travels. Its storages are the tensors' own memory; short ones are copied. Thread-safe.

    Raises: what pickle raises (AttributeError, PicklingError, TypeError), RuntimeError for a GPU tensor without a
        device map and for a torch.futures.Future; `outgoing.undo` was called then.
    """
    try:
        simple = pack_simple([(value, 0)]) if type(value) is Tensor and is_dense(value) else None
        if simple is not None:
            packed = _join_simple([], 0, simple, outgoing)
        elif outgoing.cloudpickle:
            packed = MessagePickler(cloud_pickler).pack(value, outgoing)
        else:
            try:
                pickler = _idle.pop()
            except IndexError:
                pickler = MessagePickler(Pickler)
            packed = pickler.pack(value, outgoing)
            if pickler.streamed <= _KEEP_BYTES:
                _idle.append(pickler)
        if outgoing.context == NO_CONTEXT:
            return packed
        graded = outgoing.graded if outgoing.records else ()
        about = describe_subject(outgoing.about)
        note = autograd_hooks().sent(outgoing.context, outgoing.destination, about, graded)
        return Packed(packed.body, packed.storages, note)
    except BaseException:
        for undo in reversed(outgoing.undo):
            undo()
        raise


def unpack(packed: Packed, incoming: Incoming) -> Any:
    """Return the value that `pack` was given, its tensors on the received storages without a copy. Once per message.

    Raises: RuntimeError if the sender used a name that does not exist here, and what restoring an object raises.
    """
    buffers = _arrivals(packed, incoming)
    if packed.body[-1] == _BARE[0]:
        return buffers[0]
    try:
        return pickle.loads(packed.body, buffers=buffers)
    except (AttributeError, ImportError) as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            # Raised by Python code, such as a __setstate__, and not by pickle's search for a name.
            raise
        raise RpcError(
            f"{error}. The RPC pickler does not serialize code of functions and classes, only their names: define them "
            f"under the same name in the same module on both workers."
        ) from error


def discard(packed: Packed, incoming: Incoming) -> None:
    """Drop a message unopened: its RRefs are taken over and released; no code of the user runs."""
    body = packed.body
    if body and body[-1] == _TABLE[0]:
        _restore_ahead(table_of(body)[0], incoming)


def _join_simple(stream: list[Any], streamed: int, simple: SimpleTensors, outgoing: Outgoing) -> Packed:
    parts, storages, graded = simple
    if graded:
        outgoing.graded += graded
    parts.append(_END.pack(streamed, _SIMPLE if stream else _BARE))
    return Packed(join_parts(stream + parts), storages)


def carry_ahead(
    cls: type[T], reduce: Callable[[T, Outgoing], tuple[int, ...]], restore: Callable[[tuple[int, ...], Incoming], T]
) -> None:
    """Let instances of exactly `cls` travel as numbers that are read before the stream is, and even without it."""

    def travel(pickler: MessagePickler, obj: T) -> tuple[Any, ...]:
        numbers = reduce(obj, pickler.outgoing)
        pickler.ahead[len(pickler.items)] = cls.__qualname__, numbers
        pickler.items.append(None)
        return arrived, (THE_TENSOR,)

    REDUCERS[cls] = travel
    _AHEAD[cls.__qualname__] = restore


class Pickler(pickle.Pickler):
    """pickle.Pickler, whose instances take attributes."""


class MessagePickler:
    """A pickler, and what it finds in a message that travels beside the stream. Packs one message at a time."""

    outgoing: Outgoing
    streamed: int  # Bytes of the last stream, without what travels beside it

    def __init__(self, pickler: Callable[..., Any]) -> None:
        self.items: list[tuple[Tensor, int] | None] = []  # Dense tensors with flags, in order; None for the others
        self.ahead: dict[int, _Ahead | SparseRow] = {}  # The rows of items that are no dense tensors, by place
        self.originals: dict[int, Tensor] = {}  # The sparse tensors and GPU tensors, which travel as others, by place
        self.targets: dict[int, str] = {}  # The devices that the receiver moves tensors to, by place
        self._chunks: list[bytes | memoryview] = []
        self._pickler = pickler(
            SimpleNamespace(write=self._chunks.append), _PROTOCOL, buffer_callback=self._keep_in_band
        )
        theirs = getattr(self._pickler, "reducer_override", None)
        self._pickler.reducer_override = self._reduce if theirs is None else lambda obj: self._reduce(obj, theirs)

    def pack(self, value: Any, outgoing: Outgoing) -> Packed:
        """Pack one value. Do not use the object again after an error."""
        self.outgoing = outgoing
        self._pickler.dump(value)
        chunks, items = self._chunks, self.items
        streamed = 0
        for chunk in chunks:
            streamed += memoryview(chunk).nbytes
        self.streamed = streamed
        simple = pack_simple(items) if items and not self.targets else None
        if simple is not None:
            packed = _join_simple(chunks, streamed, simple, outgoing)
        else:
            storages = self._add_table() if items else []
            packed = Packed(chunks[0] if len(chunks) == 1 else join_parts(chunks), storages)
        # Only now: long elements in the chunks are views of a tensor that these lists may be the last to hold.
        items.clear()
        chunks.clear()
        self._pickler.clear_memo()
        del self.outgoing
        return packed

    def _add_table(self) -> list[Tensor]:
        for place, item in enumerate(self.items):
            # An item without a tensor of its own is an RRef, or a sparse tensor, which is among the originals.
            tensor = self.originals.get(place) if item is None or place in self.originals else item[0]
            if tensor is not None and tensor.requires_grad:
                self.outgoing.graded.append(tensor)
        rows, memory = tensors.lay_out(self.items)
        mixed = [self.ahead.get(place, row) for place, row in enumerate(rows)]
        table = pickle.dumps((mixed, [len(piece) for piece in memory.short], self.targets or None), _PROTOCOL)
        self._chunks += (*memory.short, table, _END.pack(len(table), _TABLE))
        self.ahead.clear()
        self.originals.clear()
        self.targets.clear()
        return memory.storages

    def _reduce(self, obj: Any, otherwise: Callable[[Any], Any] | None = None) -> Any:
        """The pickler calls this for every object that is not a plain number, string or container."""
        reduce = REDUCERS.get(type(obj))
        reduced = NotImplemented if reduce is None else reduce(self, obj)
        return otherwise(obj) if reduced is NotImplemented and otherwise is not None else reduced

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer is THE_TENSOR:
            return False
        memory = buffer.raw()
        if memory.readonly or memory.nbytes < _ARRAY_BYTES:
            return True
        self.items.append((torch.frombuffer(memory, dtype=torch.uint8), RAW_MEMORY))
        return False


def cloud_pickler(*args: Any, **options: Any) -> Any:
    """Return a pickler of the package cloudpickle, which sends lambdas and local functions by value."""
    try:
        cloudpickle = import_module("cloudpickle")
    except ModuleNotFoundError:
        raise UsageError(
            "RpcBackendOptions(cloudpickle=True) needs the package cloudpickle on every rank: pip install cloudpickle."
        ) from None
    pickler = cloudpickle.Pickler(*args, **options)
    theirs = pickler.reducer_override
    pickler.reducer_override = lambda obj: obj.__qualname__ if _has_name_in_main(obj) else theirs(obj)
    return pickler


def _has_name_in_main(obj: Any) -> bool:
    """True for a function or class that the running program defines under a name.

    cloudpickle would send a copy. Every rank runs the same program: its own function uses its own global variables, and
    an instance of a copied class would not be an instance of its own class.
    """
    if not isinstance(obj, FunctionType | type) or obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def arrived(obj: Any) -> Any:
    return obj


def reduce_tensor(pickler: MessagePickler, tensor: Tensor) -> Any:
    """A tensor that is no instance of a subclass."""
    if tensor.layout is torch.strided:
        if tensor.dtype not in NAMES or tensor.is_nested or tensor.is_meta:
            return NotImplemented
        _add(pickler, tensor, 0)
    elif tensor.layout in SPARSE_LAYOUTS and tensor.dtype in NAMES and not tensor.is_meta:
        parts, row = split_sparse(tensor)
        for part in parts:
            _add(pickler, part, SPARSE_PART)
        pickler.ahead[len(pickler.items)] = row
        pickler.originals[len(pickler.items)] = tensor
        pickler.items.append(None)
    else:
        return NotImplemented
    return arrived, (THE_TENSOR,)


def _add(pickler: MessagePickler, tensor: Tensor, flags: int) -> None:
    """Let a dense tensor travel; a GPU tensor as a copy in host memory, with the device it goes to."""
    if not tensor.is_cpu:
        place, outgoing = len(pickler.items), pickler.outgoing
        pickler.targets[place] = str(target_device(tensor, outgoing.device_map, outgoing.what))
        if not flags & SPARSE_PART:
            pickler.originals[place] = tensor
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD
        # Waits for the device. Strides stay where they leave no gaps.
        tensor = tensor.detach().to("cpu")
    elif not has_memory(tensor) and not tensor._is_zerotensor() and stand_in(tensor):
        raise without_memory(f"a tensor in a message ({describe_subject(pickler.outgoing.about)})", tensor)
    pickler.items.append((tensor, flags))


def _reduce_parameter(pickler: MessagePickler, parameter: Parameter) -> Any:
    """A parameter, with the attributes that the program has set on it."""
    if parameter.layout is not torch.strided:
        return NotImplemented
    reduced = reduce_tensor(pickler, parameter)
    if reduced is NotImplemented:
        return NotImplemented
    tensor, flags = cast("tuple[Tensor, int]", pickler.items[-1])
    pickler.items[-1] = (tensor, flags | PARAMETER)
    state = parameter.__dict__
    return (*reduced, state, None, None, _set_attributes) if state else reduced


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def _reduce_storage(_: MessagePickler, storage: torch.UntypedStorage) -> Any:
    """The memory of a tensor that reduces itself: an instance of a subclass, or a quantized one."""
    if storage.device.type != "cpu":
        return NotImplemented
    return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)


def _reduce_typed_storage(_: MessagePickler, storage: torch.TypedStorage) -> Any:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    make: Callable[..., torch.TypedStorage] = torch.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)


REDUCERS: dict[type, Callable[[MessagePickler, Any], Any]] = {
    Tensor: reduce_tensor,
    Parameter: _reduce_parameter,
    torch.UntypedStorage: _reduce_storage,
    torch.TypedStorage: _reduce_typed_storage,
}
"""How objects of exactly these classes travel; pickle handles all others. NotImplemented: pickle handles this one."""

_idle: list[MessagePickler] = []  # Picklers to be used again, by any thread


def _arrivals(packed: Packed, incoming: Incoming) -> list[Any]:
    """Return what the stream takes as buffers, in order of appearance."""
    kind = packed.body[-1]
    arrivals: list[Any]
    if kind in _IS_SIMPLE:
        stop = len(packed.body) - _END.size
        start, _ = _END.unpack_from(packed.body, stop)
        arrivals = unpack_simple(packed.body, start, stop, packed.storages)
    else:
        arrivals = [] if kind == _STOP else _build_table(packed, incoming)
    if packed.note is not None:
        graded = [place for place, each in enumerate(arrivals) if isinstance(each, Tensor) and each.requires_grad]
        attached = autograd_hooks().came(packed.note, incoming.source, [arrivals[place] for place in graded])
        for place, tensor in zip(graded, attached, strict=True):
            arrivals[place] = tensor
    return arrivals


def _build_table(packed: Packed, incoming: Incoming) -> list[Any]:
    rows, pieces, targets = table_of(packed.body)
    ahead = _restore_ahead(rows, incoming)
    memory = tensors.ReceivedMemory(pieces, packed.storages)
    arrivals: list[Any] = []
    parts: list[Tensor] = []
    for place, row in enumerate(rows):
        if place in ahead:
            arrivals.append(ahead[place])
            continue
        if isinstance(row[0], str):
            arrival = tensors.assemble_sparse(parts, row)
            parts.clear()
        else:
            arrival = memory.build(row, targets.get(place) if targets else None)
            if row[-1] & tensors.SPARSE_PART:
                parts.append(arrival)
                continue
        arrivals.append(arrival)
    return arrivals


def table_of(body: Body) -> tuple[list[Any], list[bytes], dict[int, str] | None]:
    """Return the rows of a message, its short pieces of memory, and which rows go to which device."""
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
    """Return the objects that stand in the table itself, by place."""
    return {place: _AHEAD[row[0]](row[1], incoming) for place, row in enumerate(rows) if row[0] in _AHEAD}


_AHEAD: dict[str, Callable[[tuple[int, ...], Incoming], Any]] = {}  # How to restore what stands in the table, by class
