"""How bare storages travel, the memory of tensors that reduce themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
