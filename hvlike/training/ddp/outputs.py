"""The tensors in what a module returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses; those of other objects are not seen."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name, None))
