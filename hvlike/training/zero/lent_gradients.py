"""Gradients that parameters have only while something is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def gradients_of(gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Give these parameters these gradients; afterwards they have those of before."""
    kept = [(parameter, parameter.grad) for parameter in gradients]
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter, before in kept:
            parameter.grad = before
