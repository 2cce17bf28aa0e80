"""How memory travels that is no ordinary CPU tensor: bare storages; tensors on devices are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def reduce_elsewhere(tensor: Tensor) -> Any:
    """A tensor that is not in this machine's memory."""
    if tensor.is_meta:
        return NotImplemented
    raise RuntimeError(
        f"RPC only supports CPU tensors, got one of shape {list(tensor.shape)} on {tensor.device}: please move your "
        f"tensors to CPU before sending them over RPC (tensor.cpu()), and back on the other worker."
    )


def reduce_storage(storage: torch.UntypedStorage) -> Any:
    """The memory of a tensor that reduces itself: an instance of a subclass, or a quantized one."""
    if storage.device.type != "cpu":
        return NotImplemented
    return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    """The same in the form that knows its dtype."""
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    make: Callable[..., torch.TypedStorage] = torch.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)
