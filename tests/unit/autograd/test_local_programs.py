"""Random programs of several workers, gradients delivered in random order: the same as ordinary autograd has.

Simulated in one process. What a program does is in local_programs: calls, results unused, diamonds, views, changes in
place, functions with several outputs and with none for an input, leaves used often, hooks that bend what they see.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.autograd.local_programs import LocalProgram
from support.autograd.local_world import LocalWorld, OneProcess
from torch import Tensor

PROGRAMS = 60
"""In CI; thousands were run by hand."""
GROUPS = 4


@pytest.mark.parametrize("group", range(GROUPS))
def test_gradients_are_those_of_ordinary_autograd(group: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(group, PROGRAMS, GROUPS):
        kinds += compare(seed)
    assert kinds.keys() == {"plain", "selective", "final"}


def compare(seed: int) -> Counter[str]:
    """Run one program both ways, backward once to three times; return the kinds of segments."""
    size, steps, times = 2 + seed % 3, 10 + seed % 30, 1 + seed % 3
    world, alone = LocalWorld(size, seed), OneProcess(size, seed)
    program, expected = LocalProgram(world, seed, steps), LocalProgram(alone, seed, steps)
    kinds: Counter[str] = Counter()
    for time in range(times):
        alone.backward(expected.roots, retain_graph=time < times - 1)
        world.backward(program.roots, retain_graph=time < times - 1)
        kinds.update(segment.kind for local in world.passes for segment in local.segments)
    for (rank, leaf), (_, twin) in zip(program.leaves, expected.leaves, strict=True):
        assert_same(world.workers[rank].gradients.get(leaf), twin.grad)
        # retain_grad does nothing for leaves.
        assert leaf.grad is None
    for value, twin in zip(program.retained, expected.retained, strict=True):
        if not value.is_leaf:
            assert_same(value.grad, twin.grad)
    assert program.counts == expected.counts
    return kinds


def assert_same(gradient: Tensor | None, expected: Tensor | None) -> None:
    if expected is None or gradient is None:
        assert gradient is expected
    else:
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
