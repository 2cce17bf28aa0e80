"""Whole jobs of simulated ranks: the real hvlike, decided by a seed."""

from typing import Any

import pytest
import torch
from support.simulation.machine.job import simulate

from hvlike.system.system import system


def averages(hvd: Any, rank: int) -> list[float]:
    """Reduce three times, in another way each."""
    hvd.init()
    found = [hvd.allreduce(torch.full((4,), float(rank)), name="named")[0].item()]
    handles = [hvd.allreduce_async(torch.tensor([rank + each * 1.0]), name=f"async {each}") for each in range(3)]
    found += [hvd.synchronize(each).item() for each in handles]
    hvd.barrier()
    found.append(sum(hvd.allgather_object(rank)))
    hvd.shutdown()
    return found


NODES = {
    "one rank": [[0]],
    "two ranks": [[0, 1]],
    "three ranks": [[0, 1, 2]],
    "two nodes": [[0, 1], [2]],
    "apart": [[0], [1]],
}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_all_ranks_come_to_the_end_with_what_they_would_have_found(nodes: list[list[int]]) -> None:
    size = sum(map(len, nodes))
    mean = (size - 1) / 2
    for seed in range(8):
        end = simulate(averages, nodes, seed)
        assert end.hang is None, end.hang
        for rank in end.ranks:
            assert rank.error is None, rank.trace
            assert rank.result == pytest.approx([mean, mean, mean + 1, mean + 2, mean * size])


def test_the_same_seed_gives_the_same_job() -> None:
    stories = [simulate(averages, [[0, 1, 2]], 11, trace=True).story for _ in range(2)]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 20
    assert simulate(averages, [[0, 1, 2]], 12, trace=True).story != stories[0]


def waits_alone(hvd: Any, rank: int) -> None:
    """Rank 0 waits for an operation that rank 1 never begins, as it waits for a message that nobody sends."""
    hvd.init()
    if rank == 0:
        hvd.allreduce(torch.ones(1), name="alone")
    else:
        from hvlike.collectives.session.context import current

        current().fabric.loop.wait(lambda: False, None)


def test_a_job_that_never_ends_is_told_with_what_each_rank_waits_for() -> None:
    end = simulate(waits_alone, [[0, 1]], 1, most_seconds=3.0)
    assert end.hang is not None
    assert "rank 0 main: " in end.hang
    assert "rank 1 main: " in end.hang


def staged_sum(hvd: Any, rank: int) -> float:
    """A reduction through shared memory, chunk after chunk, in the background thread."""
    hvd.init()
    handle = hvd.allreduce_async(torch.full((60_000,), float(rank)), name="staged", op=hvd.Sum)
    result = hvd.synchronize(handle)
    hvd.shutdown()
    return float(result[-1])


@pytest.mark.parametrize("shares_cores", [True, False])
def test_two_ranks_that_wait_for_a_third_do_not_keep_each_other_awake(shares_cores: bool) -> None:
    staged = {"HVLIKE_PEER_MEMORY": "0"}
    for seed in range(6):
        plain = simulate(staged_sum, [[0, 1, 2]], seed, shares_cores=shares_cores, environment=staged)
        middle = plain.points * 2 // 3
        held = simulate(
            staged_sum,
            [[0, 1, 2]],
            seed,
            shares_cores=shares_cores,
            environment=staged,
            holds=[(middle, 2, 2.0)],
        )
        assert [each.result for each in held.ranks] == [3.0] * 3
        assert held.seconds > 2.0
        assert held.points < plain.points + 20_000


@pytest.mark.parametrize("nodes", [[[0, 1, 2]], [[0, 1], [2, 3]], [[0], [1], [2, 3, 4]]], ids=str)
def test_ranks_that_have_left_hear_from_rank_0_that_another_one_does_not_come(nodes: list[list[int]]) -> None:
    told = {}
    last = nodes[-1][-1]

    def leaves(hvd: Any, rank: int) -> None:
        """All but the last rank come to the end; that one stays away for longer than they wait."""
        hvd.init()
        if rank == last:
            system.sleep(60.0)
        try:
            hvd.shutdown()
        except hvd.errors.StalledError as error:
            told[rank] = str(error)
            # The first rank that ends so ends the job, so each waits for the others.
            system.sleep(1.0)

    limits = {"HVLIKE_STALL_CHECK_TIME_SECONDS": "1", "HVLIKE_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    end = simulate(leaves, nodes, 3, environment=limits, most_seconds=20.0)
    assert end.hang is None, end.hang
    assert sorted(told) == list(range(last))
    assert all(f"rank {last} has not" in each for each in told.values()), told
