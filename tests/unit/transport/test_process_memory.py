"""Ranges of another process's memory, many in one call: gathered and scattered in their order, or an error.

The process is this one: the system makes no difference.
"""

import os

import numpy as np
import pytest

from hvlike.transport.memory import process_memory
from hvlike.transport.memory.process_memory import MOST_RANGES, ROW_BYTES, ProcessMemory, Ranges


@pytest.fixture
def memory() -> ProcessMemory:
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
