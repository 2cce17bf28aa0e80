"""Elastic training that loses ranks under fault tolerance: those that are left come to the right result."""

from typing import Any

import pytest
import torch
from support.simulation.machine.job import simulate
from support.simulation.programs.elastic import Elastic
from support.simulation.run import Draw

FAULT_TOLERANT = {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(("nodes", "spares"), [([[0, 1, 2]], 0), ([[0], [1, 2]], 0), ([[0, 1, 2]], 1)])
def test_a_rank_is_lost_and_the_others_train_on(nodes: list[list[int]], spares: int) -> None:
    sizes = set()
    for points in range(4_000, 13_000, 1_500):
        program = Elastic(8, 2, "killed", [1], [points], 0, spares)
        end = simulate(program, nodes, points, **program.options())
        assert not end.violations
        assert program.judge(end) is None
        if 1 in end.killed and end.aborted is None:
            sizes.add(end.ranks[0].result[-1][1])
    # With a spare their number stays.
    assert sizes == {2}


def test_a_rank_that_raises_ends_alone() -> None:
    program = Elastic(6, 2, "raises", [1], [], 3, 0)
    end = simulate(program, [[0, 1, 2]], 5, **program.options())
    assert program.judge(end) is None
    assert end.killed == {1}
    assert [size for _, size in end.ranks[0].result] == [3, 3, 2, 2, 2, 2]


def test_an_internal_error_of_one_rank_takes_all_back_to_the_last_commit() -> None:
    program = Elastic(6, 2, "error", [1], [], 3, 0)
    end = simulate(program, [[0, 1, 2]], 5, **program.options())
    assert program.judge(end) is None
    assert not end.killed
    assert [size for _, size in end.ranks[0].result] == [3] * 6


# -- past faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [166, 235, 290, 315, 374])
def test_a_start_that_fails_leaves_no_thread_in_mpi(seed: int) -> None:
    """The loop's thread went on calling MPI while the main thread revoked the communicators."""
    job = Draw.of(seed, ["elastic"], range(2, 5), range(1, 4))
    assert not job.run().violations


def test_a_duplicate_is_not_used_before_it_is_made() -> None:
    """Its error handler was set at once, which MPI forbids."""

    def program(hvd: Any, rank: int) -> float:
        hvd.init()
        found = hvd.allreduce(torch.full((3,), float(rank)), name="x")[0].item()
        hvd.shutdown()
        return float(found)

    end = simulate(program, [[0], [1]], 1, environment=FAULT_TOLERANT)
    assert not end.violations
    assert [each.result for each in end.ranks] == [0.5, 0.5]
