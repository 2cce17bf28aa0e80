"""Values sent through the pickler without a network: what arrives shares no memory with what was sent."""

from typing import Any

import torch

from hvlike.rpc.wire.message import Packed
from hvlike.rpc.wire.pickler import Incoming, Outgoing, pack, table_of, unpack


def travel(value: Any, outgoing: Outgoing | None = None, incoming: Incoming | None = None) -> Any:
    """What a receiver gets of `value`."""
    packed = pack(value, outgoing or Outgoing(1))
    return unpack(received(packed), incoming or Incoming(0))


def received(packed: Packed) -> Packed:
    """What the network makes of it: memory of the receiver's own, a long body as a view of the whole message."""
    body = memoryview(packed.body + b"more")[:-4] if isinstance(packed.body, bytearray) else packed.body
    return Packed(body, [storage.clone() for storage in packed.storages])


def memory_bytes(packed: Packed) -> list[int]:
    """Lengths in bytes of the pieces of memory that travel, short ones first."""
    if packed.body.endswith((b"S", b"B")):
        # Simple tensors: all that travels is their elements.
        value, apart = unpack(packed, Incoming(0)), [storage.numel() for storage in packed.storages]
        sizes = [each.nbytes for each in (value if isinstance(value, list) else [value])]
        return [size for size in sizes if size not in apart] + apart
    return [len(piece) for piece in table_of(packed.body)[1]] + [storage.numel() for storage in packed.storages]


def same_memory(*tensors: torch.Tensor) -> bool:
    """Whether all lie in one storage."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
