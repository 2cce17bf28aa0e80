"""Jobs that lose a rank: the others have the promised error in time, the job ends, and nobody hangs."""

import contextlib
from typing import Any

import pytest
import torch
from support.simulation.machine.job import JobEnd, Kill, simulate

# -- how a job ends -----------------------------------------------------------------------------------


def reduces(hvd: Any, rank: int) -> None:
    """Reduce again and again."""
    hvd.init()
    for number in range(100):
        hvd.allreduce(torch.ones(3), name=f"number {number}")
    hvd.shutdown()


def endings(end: JobEnd) -> list[str]:
    return [type(each.error).__name__ if each.ended else "killed" for each in end.ranks]


def test_a_launcher_ends_the_job() -> None:
    end = simulate(reduces, [[0, 1]], 1, kills=[Kill(3000, 0)], launcher_seconds=0.02)
    assert endings(end) == ["killed", "killed"]
    assert end.aborted == (-1, 137)


@pytest.mark.parametrize("culprit", [0, 1])
def test_without_the_launcher_the_others_notice(culprit: int) -> None:
    end = simulate(reduces, [[0, 1]], 1, kills=[Kill(3000, culprit)], launcher_seconds=1000.0)
    assert endings(end)[1 - culprit] == "PeerLeftError"
    assert end.aborted == (1 - culprit, 1)
    assert max(end.gone.values()) < 8.0


def test_an_exception_ends_the_job() -> None:
    def program(hvd: Any, rank: int) -> None:
        hvd.init()
        if rank == 1:
            raise KeyError("x")
        hvd.barrier()

    end = simulate(program, [[0], [1, 2]], 3)
    assert endings(end) == ["killed", "KeyError", "killed"]
    assert end.aborted == (1, 1)


def test_a_program_that_ends_without_shutdown_ends_well() -> None:
    def program(hvd: Any, rank: int) -> None:
        hvd.init()
        hvd.barrier()

    end = simulate(program, [[0, 1]], 3)
    assert endings(end) == ["NoneType", "NoneType"]
    assert end.aborted is None


# -- past faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_shutdown_does_not_wait_for_a_lost_rank(culprit: int) -> None:
    """It waited for ever, where the launcher did not end the job."""

    def program(hvd: Any, rank: int) -> None:
        with contextlib.suppress(hvd.HorovodInternalError):
            reduces(hvd, rank)
        hvd.shutdown()

    end = simulate(program, [[0, 1, 2]], 1, kills=[Kill(3000, culprit)], launcher_seconds=1000.0)
    assert endings(end)[2] in ("PeerLeftError", "killed")
    assert end.aborted in ((2, 1), (1 - culprit, 1))
    assert max(end.gone.values()) < 8.0


@pytest.mark.parametrize("later", [20, 170])
def test_inline_operations_end_when_the_first_rank_is_lost_before_its_answer(later: int) -> None:
    """Rank 2 waited for that answer for 30 s, without a look at who is lost."""

    def program(hvd: Any, rank: int) -> None:
        hvd.init()
        for _ in range(30):
            hvd.allreduce(torch.ones(3))
        hvd.shutdown()

    kills = [Kill(2500, 1), Kill(2500 + later, 0)]
    end = simulate(program, [[0, 1, 2]], 1, kills=kills, launcher_seconds=1000.0, points_per_switch=1.5)
    assert endings(end) == ["killed", "killed", "PeerLeftError"]
    assert end.gone[2] < 8.0
