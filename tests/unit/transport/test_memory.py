"""Memory: shared segments and allocations, that of other processes, and blocks to receive into."""

import errno
import gc
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvlike.errors import LaunchError
from hvlike.system.mapped_memory import Segment, SegmentLocation, SegmentOffer, accept, make_offer
from hvlike.system.system import system
from hvlike.transport.memory import process_memory, segment
from hvlike.transport.memory.allocations import Allocation, Allocations, available_bytes, spread
from hvlike.transport.memory.malloc import ALWAYS_MAPPED_BYTES, allocate_receive_buffer
from hvlike.transport.memory.process_memory import MOST_RANGES, ROW_BYTES, ProcessMemory, Ranges


@pytest.mark.parametrize("memfd", [True, False])
def test_an_offer_is_mapped_by_who_accepts_it_and_leaves_no_name(memfd: bool) -> None:
    made = SegmentOffer(4096, memfd=memfd)
    mapped = accept(made.offer)
    assert mapped is not None
    assert made.segment is not None
    made.withdraw()
    assert not os.path.exists(made.offer.path)
    assert not mapped.array.any()
    made.segment.array[100] = 7
    assert mapped.array[100] == 7


def test_another_file_under_the_same_path_is_not_mistaken_for_the_offer() -> None:
    made = SegmentOffer(4096, memfd=True)
    assert made.segment is not None
    made.segment.array[:16] = 0
    assert accept(made.offer) is None
    made.withdraw()


def test_an_offer_that_cannot_be_opened_or_has_another_size_is_declined() -> None:
    made = SegmentOffer(4096, memfd=False)
    offer = made.offer
    made.withdraw()
    assert accept(offer) is None
    other = SegmentOffer(8192, memfd=True)
    assert accept(SegmentLocation(other.offer.path, 4096, other.offer.cookie)) is None
    other.withdraw()


def test_memory_that_the_system_refuses_is_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = tempfile.mkstemp

    def recording(**arguments: str) -> tuple[int, str]:
        file, path = make(**arguments)
        made.append(path)
        return file, path

    monkeypatch.setattr(tempfile, "mkstemp", recording)
    assert make_offer(1 << 62, 0) is None
    assert make_offer(1 << 62, 1) is None
    assert [os.path.exists(path) for path in made] == [False]


class Alone:
    """A communicator of one rank."""

    rank = 0

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def test_ranks_that_cannot_share_are_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "make_offer", lambda nbytes, attempt: None)
    with pytest.raises(LaunchError, match="--shm-size"):
        segment.share(Alone(), 4096)


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
    made = allocation()
    assert made.populate()
    assert not made.copy(5).any()

    def advise(self: Segment, advice: int, start: int, length: int) -> None:
        ranges.append((start, length))
        if error is not None:
            raise OSError(error, "refused")

    monkeypatch.setattr(Segment, "advise", advise)
    assert made.populate() is fine
    assert ranges == [(spread(BYTES), spread(BYTES))]


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


@pytest.fixture
def memory() -> ProcessMemory:
    """That of this process: the system makes no difference."""
    return ProcessMemory(os.getpid())


def ranges_of(pieces: list[np.ndarray]) -> Ranges:
    table = Ranges([piece.nbytes for piece in pieces])
    table.addresses[:] = [piece.ctypes.data for piece in pieces]
    return table


@pytest.mark.parametrize("count", [1, 3, MOST_RANGES])
def test_ranges_are_gathered_and_scattered_in_their_order(memory: ProcessMemory, count: int) -> None:
    pieces = [np.full(1 + index % 5, index, np.int64) for index in range(count)]
    table = ranges_of(pieces)
    row = np.empty(sum(map(len, pieces)), np.int64)
    memory.gather(table.start, count, row.ctypes.data, row.nbytes)
    assert np.array_equal(row, np.concatenate(pieces))
    row += 7
    memory.scatter(table.start, count, row.ctypes.data, row.nbytes)
    assert all((piece == index + 7).all() for index, piece in enumerate(pieces))


def test_a_part_of_a_table_is_taken(memory: ProcessMemory) -> None:
    pieces = [np.full(2, index, np.int64) for index in range(4)]
    table = ranges_of(pieces)
    row = np.empty(4, np.int64)
    memory.gather(table.start + ROW_BYTES, 2, row.ctypes.data, row.nbytes)
    assert row.tolist() == [1, 1, 2, 2]


def test_what_the_system_leaves_out_is_copied_after_all(memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = process_memory.FUNCTIONS["process_vm_readv"]
    monkeypatch.setitem(
        process_memory.FUNCTIONS,
        "process_vm_readv",
        lambda process, mine, n, rows, count, flags: real(process, mine, n, rows, min(count, 2), flags),
    )
    pieces = [np.full(3, index, np.int64) for index in range(5)]
    table = ranges_of(pieces)
    row = np.zeros(15, np.int64)
    memory.gather(table.start, 5, row.ctypes.data, row.nbytes)
    assert np.array_equal(row, np.concatenate(pieces))


def test_memory_that_is_not_there_is_an_error(memory: ProcessMemory) -> None:
    piece, row = np.zeros(2, np.int64), np.zeros(4, np.int64)
    table = Ranges([16, 16])
    table.addresses[:] = [piece.ctypes.data, 8]
    with pytest.raises(OSError, match="process_vm_readv with process"):
        memory.gather(table.start, 2, row.ctypes.data, row.nbytes)


def test_a_process_that_is_gone_is_an_error() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    piece, row = np.zeros(2, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ProcessLookupError):
        ProcessMemory(child).scatter(ranges_of([piece]).start, 1, row.ctypes.data, row.nbytes)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(address: int) -> bool:
    """Whether huge pages are wanted for the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_large_blocks_are_wanted_in_huge_pages() -> None:
    tensor = allocate_receive_buffer((ALWAYS_MAPPED_BYTES // 4 + 1024, 2), torch.float32)
    assert tensor.shape == (ALWAYS_MAPPED_BYTES // 4 + 1024, 2)
    assert advised(tensor.data_ptr() + tensor.nbytes // 2)
    # All of it can be written.
    assert tensor.fill_(1).sum(dtype=torch.float64) == tensor.numel()


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1 << 20,)], ids=str)
def test_small_blocks_are_ordinary_tensors(shape: tuple[int, ...]) -> None:
    tensor = allocate_receive_buffer(shape, torch.int16)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.int16)
    tensor.resize_(100)
