"""Values sent through the pickler without a network: what arrives shares no memory with what was sent."""

from typing import Any

import torch

from hvlike.rpc.message import Packed
from hvlike.rpc.pickler import Incoming, Outgoing, pack, unpack


def travel(value: Any, outgoing: Outgoing | None = None, incoming: Incoming | None = None) -> Any:
    """What a receiver gets of `value`."""
    packed = pack(value, outgoing or Outgoing(1))
    return unpack(received(packed), incoming or Incoming(0))


def received(packed: Packed) -> Packed:
    """What the network makes of it: storages of the receiver's own."""
    return Packed(packed.body, [storage.clone() for storage in packed.storages])


def storage_bytes(packed: Packed) -> list[int]:
    """Lengths of the storages in bytes, in their order."""
    return [storage.numel() for storage in packed.storages]


def same_memory(*tensors: torch.Tensor) -> bool:
    """Whether all lie in one storage."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
