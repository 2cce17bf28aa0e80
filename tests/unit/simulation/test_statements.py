"""Threads of a rank lose their core between two statements of hvlike, where a real system may take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.simulation.machine.job import simulate
from support.simulation.machine.statements import HVLIKE

from hvlike.system.system import system

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


def test_the_same_seed_takes_the_core_at_the_same_statements() -> None:
    def program(hvd: Any, rank: int) -> Any:
        hvd.init()
        total = hvd.allreduce_async(torch.ones(3), op=hvd.Sum).result()
        hvd.shutdown()
        return total.tolist()

    def story(seed: int) -> list[str]:
        end = simulate(program, [[0, 1], [2]], seed, statements=20.0, trace=True)
        assert end.held > 0
        return end.story

    assert [story(seed) for seed in range(3)] == [story(seed) for seed in range(3)]
