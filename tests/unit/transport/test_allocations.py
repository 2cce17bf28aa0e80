"""Shared allocations: found by address while a tensor holds them, forgotten with it; how much memory there is."""

import errno
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from hvlike.system.mapped_memory import Segment
from hvlike.transport.memory.allocations import Allocation, Allocations, available_bytes, spread

BYTES = 1000
FLOAT = np.dtype(np.float32)


def allocation(number: int = 1, rank: int = 5, ranks: tuple[int, ...] = (3, 5, 8)) -> Allocation:
    return Allocation((0, number), ranks, rank, BYTES, Segment.private(len(ranks) * spread(BYTES)))


def test_copies_are_pages_of_their_own() -> None:
    made = allocation()
    for rank in (3, 5, 8):
        made.copy(rank)[:] = rank
    assert all((made.copy(rank) == rank).all() and len(made.copy(rank)) == BYTES for rank in (3, 5, 8))
    assert made.start == made.copy(5).ctypes.data
    assert made.copy(8).ctypes.data - made.copy(5).ctypes.data == spread(BYTES)
    assert made.includes([5, 8])
    assert not made.includes([5, 6])


def test_own_bytes_are_found_by_address_and_no_others() -> None:
    table = Allocations()
    first, second = allocation(1), allocation(2)
    memories = [table.add(each, FLOAT) for each in (first, second)]
    assert [len(each) for each in memories] == [BYTES // 4] * 2
    assert table.find(first.start, BYTES) == (first, 0)
    assert table.find(second.start + 400, 600) == (second, 400)
    assert table.find(first.start, BYTES + 1) is None
    assert table.find(first.copy(3).ctypes.data, 4) is None
    assert table.find(first.copy(8).ctypes.data, 4) is None
    assert table.find(0, 4) is None


def test_an_allocation_lives_as_long_as_the_storage_of_the_tensor() -> None:
    table = Allocations()
    made = allocation()
    start = made.start
    tensor = torch.from_numpy(table.add(made, FLOAT))
    view = tensor[10:20].view(2, 5)
    del tensor
    gc.collect()
    assert table.find(view.data_ptr(), 40) == (made, 40)
    del view
    gc.collect()
    assert len(table) == 0
    assert table.find(start, 4) is None


def test_one_that_was_forgotten_does_not_hide_others() -> None:
    table = Allocations()
    made = [allocation(number) for number in range(5)]
    memories = [table.add(each, FLOAT) for each in made]
    assert table.find(made[0].start, 4) is not None
    del memories[2]
    for index in (0, 1, 3, 4):
        assert table.find(made[index].start, 4) == (made[index], 0)
    assert table.find(made[2].start, 4) is None


def test_numbers_count_within_each_group() -> None:
    table = Allocations()
    assert [table.next_number(group) for group in (0, 3, 0, 3, 0)] == [(0, 1), (3, 1), (0, 2), (3, 2), (0, 3)]


@pytest.mark.parametrize(("error", "fine"), [(None, True), (errno.EINVAL, True), (errno.ENOMEM, False)])
def test_pages_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch, error: int | None, fine: bool) -> None:
    ranges: list[tuple[int, int]] = []

    def advise(self: Segment, advice: int, start: int, length: int) -> None:
        ranges.append((start, length))
        if error is not None:
            raise OSError(error, "refused")

    monkeypatch.setattr(Segment, "advise", advise)
    assert allocation().populate() is fine
    assert ranges == [(spread(BYTES), spread(BYTES))]


def test_pages_are_there_after_populating() -> None:
    made = allocation()
    assert made.populate()
    assert not made.copy(5).any()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     500 kB\nHugePages_Total:   0\n"}
GROUP = {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.current": "300000\n"}
STAT = {"sys/fs/cgroup/job/step/memory.stat": "anon 100000\ninactive_file 50000\n"}
LIMIT = "sys/fs/cgroup/job/step/memory.max"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 512_000),
        (MEMINFO | GROUP, 512_000),
        (MEMINFO | GROUP | {LIMIT: "max\n"}, 512_000),
        (MEMINFO | GROUP | {LIMIT: "400000\n"}, 100_000),
        (MEMINFO | GROUP | STAT | {LIMIT: "400000\n"}, 150_000),
        (MEMINFO | GROUP | STAT | {LIMIT: "900000\n"}, 512_000),
        (GROUP | STAT | {LIMIT: "100000\n"}, 0),
    ],
    ids=["nothing", "system", "group", "no limit", "limit", "files", "system is less", "beyond"],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert available_bytes(write(tmp_path, files)) == expected


def test_this_system_has_memory() -> None:
    available = available_bytes()
    assert available is None or available > 1 << 20
