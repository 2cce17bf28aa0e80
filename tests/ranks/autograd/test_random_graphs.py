"""Random programs of several workers have the gradients of one process, in every mode, however their messages come."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest
from support.autograd.courier import Courier
from support.autograd.random_graphs import Expected, Key, Modules, difference, forget_leaves, run_in_one_process
from support.autograd.random_graphs import run_over_workers as run
from support.autograd.random_programs import draw_program

SEEDS = {1: range(10), 2: range(120), 3: range(240, 320)}
"""By number of workers: 200 over several workers; simulated jobs have others."""
TOLERANCE = 1e-6


@pytest.fixture
def courier(rpc: ModuleType, autograd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Courier]:
    """A session in which messages between workers are held back for moments."""
    Modules.rpc, Modules.autograd = rpc, autograd
    carrying = Courier(seed=rpc.get_worker_info().id, part=0.3, seconds=1e-3)
    with carrying.instead_of_the_agent(monkeypatch) as ready:
        yield ready
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
def test_gradients_are_those_of_one_process(hvd: ModuleType, courier: Courier, mode: str) -> None:
    for key in keys(hvd.size(), hvd.rank()):
        if mode != "fast" or expected(key).every_result_is_used:
            apart = difference(run(key, mode=mode), expected(key).gradients)
            assert apart < TOLERANCE, f"{key} in mode {mode} is off by {apart}\n{draw_program(*key)}"
    if hvd.size() > 1:
        assert courier.carried > 0


def test_a_program_with_unused_results_is_an_error_in_fast_and_leaves_the_next_one_alone(
    hvd: ModuleType, courier: Courier
) -> None:
    wasteful = [key for key in keys(hvd.size(), hvd.rank()) if wastes_in_its_first_pass(key)][:10]
    assert wasteful
    for key in wasteful:
        with pytest.raises(RuntimeError, match="fast"):
            run(key, mode="fast")
        assert difference(run(key, mode="safe"), expected(key).gradients) < TOLERANCE


def wastes_in_its_first_pass(key: Key) -> bool:
    """FAST cannot run it, and it is not the owner of an RRef that begins the pass, always in mode safe."""
    return not expected(key).every_result_is_used and not any(each.distant for each in draw_program(*key).passes)
