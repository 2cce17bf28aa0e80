"""What parameters are worth, in short: enough to see that the ranks do not start from the same model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_SAMPLE = 16
"""Elements of each that are looked at: initialisation, or a checkpoint loaded on one rank, changes them all."""


def fingerprints(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Return a number for each, which differs where the first elements do. Local; waits once for each device."""
    numbers = [0] * len(parameters)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, each in enumerate(parameters):
        kinds.setdefault((each.device, each.dtype), []).append(index)
    for indices in kinds.values():
        samples = [parameters[index].detach().reshape(-1)[:_SAMPLE] for index in indices]
        together = torch.cat(samples).cpu().view(torch.uint8).numpy().tobytes()
        start = 0
        for index, sample in zip(indices, samples, strict=True):
            end = start + sample.numel() * sample.element_size()
            numbers[index] = zlib.crc32(together[start:end])
            start = end
    return tuple(numbers)
