"""Reductions in the ranks' own memory: every chunk by one rank, in the order of the ranks, with the bits of staging."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvlike.backends.arithmetic.arithmetic import Arithmetic
from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.shared_memory.cma import (
    CROWDED_LEAST_WORK,
    LEAST_WORK,
    PASSES,
    SHORT_MEAN,
    CmaMemory,
    CmaReduction,
)
from hvlike.backends.shared_memory.region import ADDRESSES
from hvlike.backends.shared_memory.schedule import CHUNK_BYTES
from hvlike.transport.memory.process_memory import MOST_RANGES

pytestmark = pytest.mark.pure

SUM = Arithmetic(torch.float32, ReduceOp.SUM)
CHUNK = CHUNK_BYTES // 4


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([1], id="one element"),
        pytest.param([CHUNK], id="one chunk"),
        pytest.param([CHUNK + 1], id="a chunk and an element"),
        pytest.param([5, 3 * CHUNK, 70], id="short and long ones"),
        pytest.param([CHUNK * PASSES * 7 + 3], id="many chunks"),
        pytest.param([1 + index % 7 for index in range(MOST_RANGES + 5)], id="more short ones than a chunk takes"),
        pytest.param([3 * CHUNK // 16] * 40, id="several chunks of short ones"),
    ],
)
@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "at odd addresses"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_chunk_is_reduced_once(ranks: int, odd: int, lengths: list[int]) -> None:
    generator = np.random.default_rng(1)
    copies = [[np.empty(4 * n + odd, np.uint8)[odd:].view(np.float32) for n in lengths] for _ in range(ranks)]
    for each in copies:
        for copy in each:
            copy[:] = generator.standard_normal(len(copy))
    expected = [first + second for first, second in zip(copies[0], copies[1], strict=True)]
    for more in copies[2:]:
        for total, each in zip(expected, more, strict=True):
            total += each
    counters = [
        SimpleNamespace(addresses=np.array([each.ctypes.data for each in of_rank], np.uint64), words=[0] * 16)
        for of_rank in copies
    ]
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        region: Any = SimpleNamespace(rank=rank, ranks=ranks, peers=peers, counters=counters, mine=counters[rank])
        region.others, region.fence = [counters[peer] for peer in peers], lambda: None
        reduction = CmaReduction(region, CmaMemory([os.getpid()] * ranks), SUM, lengths)
        reduction.begin(5)
        while reduction.unfinished:
            reduction.advance()
    for of_rank in copies:
        assert all(np.array_equal(each, total) for each, total in zip(of_rank, expected, strict=True))


@pytest.mark.parametrize(
    ("sizes", "crowded", "expected"),
    [
        ([LEAST_WORK // 128] * 128, False, True),
        ([LEAST_WORK // 128 - 1] * 128, False, False),
        ([SHORT_MEAN] * 100, False, False),
        ([1, 4 * SHORT_MEAN, *[1] * 20, LEAST_WORK], False, True),
        ([LEAST_WORK // 128] * 128, True, False),
        ([CROWDED_LEAST_WORK // 1024] * 1024, True, True),
        ([1 << 10] * (ADDRESSES + 1), False, False),
    ],
)
def test_only_much_work_of_short_tensors_is_done_in_the_peers_memory(
    sizes: list[int], crowded: bool, expected: bool
) -> None:
    assert CmaMemory([1, 2], crowded=crowded).suits(sizes) is expected
    assert not CmaMemory([]).suits(sizes)
