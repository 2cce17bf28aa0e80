"""What a main thread computes while its rank waits for another one: kinds of work that use core and GIL differently."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

Work = Callable[[], None]


def works() -> dict[str, Work]:
    """One short piece of work of each kind, well below a millisecond where that is possible."""
    return {
        "matmul": _matmul(),
        "forward and backward": _training(),
        "small operations": _small_operations(),
        "pure Python": _python,
    }


def repeated(work: Work, seconds: float) -> Work:
    """Work that takes about so long: the piece so many times."""
    for _ in range(3):
        work()
    start = time.perf_counter()
    pieces = 0
    while time.perf_counter() - start < seconds:
        work()
        pieces += 1
    count = max(1, math.ceil(pieces))

    def run() -> None:
        for _ in range(count):
            work()

    return run


def _matmul() -> Work:
    a, b, product = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)

    def work() -> None:
        torch.mm(a, b, out=product)

    return work


def _training() -> Work:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch = torch.randn(32, 64)

    def work() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return work


def _small_operations() -> Work:
    x = torch.zeros(64)

    def work() -> None:
        for _ in range(50):
            x.add_(1.0)

    return work


def _python() -> None:
    total = 0
    for number in range(2000):
        total += number * number
