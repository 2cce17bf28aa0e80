"""What a program has left on a rank, as plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Value:
    """A tensor, or that there is none."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    data: bytes

    @staticmethod
    def of(tensor: Tensor | None) -> Value | None:
        """Copy a tensor."""
        if tensor is None:
            return None
        dense = tensor.detach()
        if hasattr(dense, "full_tensor"):
            # Sharded: all ranks come here together.
            dense = dense.full_tensor()
        dense = (dense.to_dense() if dense.layout is not torch.strided else dense).contiguous()
        data = dense.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if dense.numel() else b""
        return Value(str(dense.dtype), tuple(dense.shape), str(tensor.layout), data)

    def tensor(self) -> Tensor:
        """Return what was copied, dense, in float64 or complex128."""
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        if not self.data:
            return torch.empty(self.shape, dtype=torch.float64)
        found = torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)
        return found.to(torch.complex128 if dtype.is_complex else torch.float64)


@dataclass(frozen=True)
class Failure:
    """The exception that has ended a program on a rank."""

    action: int
    kind: str
    text: str
    bases: tuple[str, ...] = ()
    trace: str = ""

    def __str__(self) -> str:
        return f"action {self.action}: {self.kind}: {self.text}"


@dataclass
class Outcome:
    """What one rank has seen: values by name after some of the actions, and how it ended."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failure: Failure | None = None
    log: list[str] = field(default_factory=list)
