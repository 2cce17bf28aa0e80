"""Pickle a structure without the tensors in it: they travel as tensors, the rest as bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorForm:
    """What a rank must know to receive a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def __str__(self) -> str:
        return f"shape {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[Tensor, int]) -> None:
        super().__init__(file, protocol=5)
        self.known = known
        self.tensors: dict[Tensor, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if not isinstance(obj, Tensor):
            return None
        if obj in self.known:
            return "known", self.known[obj]
        return "tensor", self.tensors.setdefault(obj, len(self.tensors))


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, known: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self.sources = {"known": known, "tensor": tensors}

    def persistent_load(self, pid: tuple[str, int]) -> Tensor:
        source, number = pid
        return self.sources[source][number]


def pack(structure: Any, known: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return the pickled structure and the tensors in it, each once; `known` ones (parameters) only as their index."""
    file = io.BytesIO()
    packer = _Packer(file, {tensor: place for place, tensor in enumerate(known)})
    packer.dump(structure)
    return file.getvalue(), list(packer.tensors)


def unpack(data: bytes, known: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    """Return the structure that `pack` was given, with these tensors instead of the packed ones."""
    return _Unpacker(data, known, tensors).load()
