"""Bytes through the slots of a region: every chunk arrives once, in order, whoever goes on first."""

import random

import pytest
import torch
from support.backends.node import on_all, play, regions

from hvlike.backends.shared_memory.region import Region
from hvlike.backends.shared_memory.transfer import alltoall, gather

pytestmark = pytest.mark.pure

CHUNK = 4096


def noise(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 255, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check() -> None:
    """Nobody gives up."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_an_owner_has_all_have(ranks: int, seed: int) -> None:
    everybody, draw = regions(ranks, CHUNK), random.Random(seed)
    for step in range(3):
        lengths = [9 * CHUNK + 5, 0, 3, CHUNK]
        owners = [(step + index) % ranks for index in range(len(lengths))]
        expected = [noise(length, 100 * step + index) for index, length in enumerate(lengths)]

        def tensors(region: Region, step: int = step, values: list[torch.Tensor] = expected) -> list[torch.Tensor]:
            mine = [(step + index) % ranks == region.rank for index in range(len(values))]
            return [value.clone() if own else torch.zeros_like(value) for own, value in zip(mine, values, strict=True)]

        each = on_all(everybody, tensors)
        play(
            draw,
            [
                gather(region, zip(mine, owners, strict=True), check)
                for region, mine in zip(everybody, each, strict=True)
            ],
        )
        assert all(torch.equal(one, value) for mine in each for one, value in zip(mine, expected, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_everybody_has_what_was_sent_to_it(ranks: int, seed: int) -> None:
    everybody, draw = regions(ranks, CHUNK), random.Random(seed)
    for step in range(3):
        lengths = [[(5 * CHUNK * (a + 2 * b + step)) % 30011 for b in range(ranks)] for a in range(ranks)]
        sends = [[noise(length, 7 * a + b) for b, length in enumerate(lengths[a])] for a in range(ranks)]
        receives = [[torch.zeros(lengths[a][b], dtype=torch.uint8) for a in range(ranks)] for b in range(ranks)]
        play(
            draw,
            [alltoall(region, sends[region.rank], receives[region.rank], check) for region in everybody],
        )
        assert all(torch.equal(receives[b][a], sends[a][b]) for a in range(ranks) for b in range(ranks))


def test_an_alltoall_leaves_slots_in_which_a_reduction_is_under_way() -> None:
    everybody = regions(2, CHUNK)
    sends = [torch.ones(5, dtype=torch.uint8) for _ in range(2)]
    everybody[0].turns[1] += 1
    running = alltoall(everybody[0], sends, [torch.zeros(5, dtype=torch.uint8) for _ in range(2)], check)
    for _ in range(5):
        next(running)
    assert list(everybody[0].mine.passed) == [0, 0]
    everybody[1].mine.words[0] = 1
    next(running)
    assert list(everybody[0].mine.passed) == [0, 0]
    everybody[1].mine.taken[1] = everybody[0].mine.taken[1] = 1
    next(running)
    assert list(everybody[0].mine.passed) == [0, 1]
