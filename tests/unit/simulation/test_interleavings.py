"""Where threads and ranks may meet: between two statements of hvlike, and in the order in which words are seen.

The latter are the litmus tests of the literature, over many seeds. Source: Alglave et al., Herding Cats, TOPLAS 36(2),
2014: MP, SB, CoRR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.simulation.machine.job import simulate
from support.simulation.machine.statements import HVLIKE
from support.simulation.machine.store_buffers import Order
from support.simulation.programs.collectives import Uneven
from support.simulation.run import Draw, what_is_wrong

from hvlike.backends.operation import Operation
from hvlike.collectives.api import barrier_join
from hvlike.system.system import system
from hvlike.transport.memory.doorbell import Fence

SOURCE = """
def count(box):
    value = box[0]
    box[0] = value + 1
"""


def counts(folder: str, statements: float, *, locks: bool = False) -> set[int]:
    """What two threads count to, who count to 20 together; the function they call is in a file of this folder."""
    names: dict[str, Any] = {}
    exec(compile(SOURCE, f"{folder}/counter.py", "exec"), names)

    def program(hvd: Any, rank: int) -> int:
        box, lock, pause = [0], system.Lock(), system.Lock()

        def run() -> None:
            for _ in range(10):
                with pause:
                    pass
                if locks:
                    with lock:
                        names["count"](box)
                else:
                    names["count"](box)

        other = system.Thread(target=run)
        other.start()
        run()
        other.join()
        return box[0]

    return {
        simulate(program, [[0]], seed, points_per_switch=2.0, statements=statements).ranks[0].result
        for seed in range(40)
    }


def test_another_thread_may_go_on_between_two_statements() -> None:
    found = counts(HVLIKE, 3.0)
    assert min(found) < 20 == max(found)


@pytest.mark.parametrize(
    ("folder", "statements", "locks"), [(HVLIKE, 0.0, False), (HVLIKE, 3.0, True), ("/elsewhere", 3.0, False)]
)
def test_none_goes_on_there_unless_it_may(folder: str, statements: float, locks: bool) -> None:
    assert counts(folder, statements, locks=locks) == {20}


SEEDS = range(200)

Ends = set[tuple[int, ...]]

Program = Callable[[Any, Callable[[], object]], tuple[int, ...]]
"""(the words of all, a fence): what the rank has read."""


def ends(stores: Order, *programs: Program) -> Ends:
    """What the ranks have read, in the order of the ranks, in all jobs."""
    found = set()
    for seed in SEEDS:
        memory: list[Any] = []

        def program(hvd: Any, rank: int, memory: list[Any] = memory) -> tuple[int, ...]:
            if not memory:
                memory.append(system.private(64))
            return programs[rank](system.words(memory[0], 0, 8), Fence())

        ranks = list(range(len(programs)))
        end = simulate(program, [ranks], seed, points_per_switch=2.0, stores=stores)
        found.add(tuple(value for each in end.ranks for value in each.result))
    return found


def write(*, fence: bool) -> Program:
    """Write a value, and then that it is there."""

    def program(words: Any, order: Callable[[], object]) -> tuple[int, ...]:
        words[0] = 1
        if fence:
            order()
        words[1] = 1
        return ()

    return program


def read(*, fence: bool) -> Program:
    """Read whether it is there, and then the value."""

    def program(words: Any, order: Callable[[], object]) -> tuple[int, ...]:
        there = words[1]
        if fence:
            order()
        return there, words[0]

    return program


@pytest.mark.parametrize(("fences", "stores", "may_miss"), [
    ((False, False), "at once", False),
    ((False, False), "in order", False),
    ((False, False), "reordered", True),
    ((True, False), "reordered", True),
    ((False, True), "reordered", True),
    ((True, True), "reordered", False),
])  # fmt: skip
def test_who_sees_a_flag_sees_what_was_written_before_it(
    fences: tuple[bool, bool], stores: Order, may_miss: bool
) -> None:
    found = ends(stores, write(fence=fences[0]), read(fence=fences[1]))
    assert found - {(1, 0)} == {(0, 0), (0, 1), (1, 1)}
    assert ((1, 0) in found) is may_miss


def announce(mine: int, other: int, *, fence: bool) -> Program:
    """Say that this rank is here, and look whether the other one is."""

    def program(words: Any, order: Callable[[], object]) -> tuple[int, ...]:
        words[mine] = 1
        if fence:
            order()
        return (words[other],)

    return program


@pytest.mark.parametrize(("fence", "stores", "may_miss"), [
    (False, "at once", False),
    (False, "in order", True),
    (False, "reordered", True),
    (True, "in order", False),
    (True, "reordered", False),
])  # fmt: skip
def test_of_two_that_announce_themselves_one_sees_the_other(fence: bool, stores: Order, may_miss: bool) -> None:
    found = ends(stores, announce(0, 1, fence=fence), announce(1, 0, fence=fence))
    assert {(0, 1), (1, 0)} <= found
    assert ((0, 0) in found) is may_miss


@pytest.mark.parametrize("stores", ["in order", "reordered"])
def test_a_word_never_goes_back(stores: Order) -> None:
    def count(words: Any, order: Callable[[], object]) -> tuple[int, ...]:
        for value in range(1, 5):
            words[0] = value
        return ()

    def look(words: Any, order: Callable[[], object]) -> tuple[int, ...]:
        return tuple(words[0] for _ in range(6))

    found = ends(stores, count, look)
    assert len(found) > 10
    assert all(list(each) == sorted(each) for each in found)


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_a_thread_may_lose_its_core_just_after_its_join_is_on_its_way(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others hear of it by another thread of this rank, and go on with what stands in for this one."""
    submit = barrier_join.submit_join

    def submit_and_wait(*arguments: Any, **options: Any) -> Operation:
        handle = submit(*arguments, **options)
        system.sleep(0.05)
        return handle

    monkeypatch.setattr(barrier_join, "submit_join", submit_and_wait)
    job = Draw(seed, "join", [[0, 1, 2]] if seed % 2 else [[0, 1], [2]], 10.0, [], False, {})
    assert what_is_wrong(job.run(Uneven.draw(seed, 3)), job) is None
