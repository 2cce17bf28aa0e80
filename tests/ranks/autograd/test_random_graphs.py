"""Random programs of several workers have the gradients of one process, in every mode.

Simulated jobs run such programs with their messages in every order (tests/support/simulation/programs/autograd.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest
from support.autograd.random_graphs import Expected, Key, Modules, difference, forget_leaves, run_in_one_process
from support.autograd.random_graphs import run_over_workers as run
from support.autograd.random_programs import draw_program

pytestmark = pytest.mark.differs_by_ranks(2)

SEEDS = {1: range(10), 2: range(80), 3: range(240, 300)}
"""By number of workers; simulated jobs have others."""
TOLERANCE = 1e-6


@pytest.fixture
def home(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> Iterator[int]:
    """A session in which this worker is the home of programs."""
    Modules.rpc, Modules.autograd = rpc, autograd
    yield hvd.rank()
    # Until the last worker is through, messages of its programs come and go.
    rpc.api._all_gather(None)
    forget_leaves()


@cache
def expected(key: Key) -> Expected:
    return run_in_one_process(key)


def keys(size: int, rank: int) -> list[Key]:
    """Each worker is the home of its part of the programs; all of them run at the same time."""
    return [(seed, size, rank) for seed in SEEDS.get(size, range(20)) if seed % size == rank]


@pytest.mark.parametrize("mode", ["safe", "smart", "fast"])
def test_gradients_are_those_of_one_process(hvd: ModuleType, home: int, mode: str) -> None:
    for key in keys(hvd.size(), home):
        if mode != "fast" or expected(key).every_result_is_used:
            apart = difference(run(key, mode=mode), expected(key).gradients)
            assert apart < TOLERANCE, f"{key} in mode {mode} is off by {apart}\n{draw_program(*key)}"


def test_a_program_with_unused_results_is_an_error_in_fast_and_leaves_the_next_one_alone(
    hvd: ModuleType, home: int
) -> None:
    wasteful = [key for key in keys(hvd.size(), home) if wastes_in_its_first_pass(key)][:10]
    assert wasteful
    for key in wasteful:
        with pytest.raises(RuntimeError, match="fast"):
            run(key, mode="fast")
        assert difference(run(key, mode="safe"), expected(key).gradients) < TOLERANCE


def wastes_in_its_first_pass(key: Key) -> bool:
    """FAST cannot run it, and it is not the owner of an RRef that begins the pass, always in mode safe."""
    return not expected(key).every_result_is_used and not any(each.distant for each in draw_program(*key).passes)
