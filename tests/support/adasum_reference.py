"""Adasum by its definition, in float64 in one process: what the ranks' results are compared with."""

import torch
from torch import Tensor


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Of two contributions."""
    common = float((first * second).sum())
    norms = [float(each.square().sum()) for each in (first, second)]
    factors = [1.0 if norm == 0 else 1.0 - common / (2.0 * norm) for norm in norms]
    return factors[0] * first + factors[1] * second


def adasum(contributions: list[Tensor]) -> Tensor:
    """Of any number: neighbours first, as in a knock-out tournament where the odd one gets a bye."""
    left = [each.to(torch.float64) for each in contributions]
    while len(left) > 1:
        winners = [combine(*left[number : number + 2]) for number in range(0, len(left) - 1, 2)]
        left = winners + left[len(left) - len(left) % 2 :]
    return left[0]
