"""Simulated jobs of torch.distributed over hvlike."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from support.simulation.machine.job import simulate
from support.simulation.programs.torch_groups import COLLECTIVES, Torch
from support.simulation.run import Draw, what_is_wrong


@pytest.mark.parametrize("seed", range(6))
def test_random_jobs(seed: int) -> None:
    job = Draw.of(seed, ["torch"], range(2, 5), range(1, 3))
    wrong = what_is_wrong(job.run(), job)
    assert wrong is None, f"{job}\n{wrong}"


def test_the_same_seed_gives_the_same_job() -> None:
    stories = [Draw.of(3, ["torch"], range(2, 4), range(1, 3)).run(trace=True).story for _ in range(2)]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 50


def test_all_operations_are_drawn() -> None:
    operations = [
        each for seed in range(60) for run in Torch.draw(seed, 3).runs for made in run.rounds for each in made
    ]
    assert {each.what for each in operations} == {*COLLECTIVES, "message"}


def knows_its_own_groups(hvd: Any, rank: int) -> tuple[int, int]:
    """Ranks 0 and 1 make a group of the same name as the other two."""
    dist.init_process_group("hvlike")
    mine = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(mine, use_local_synchronization=True)
    total = torch.tensor(rank)
    dist.all_reduce(total, group=group)
    found = int(total), dist.get_rank(group)
    dist.destroy_process_group()
    hvd.shutdown()
    return found


def test_each_rank_knows_its_own_groups_and_torch_those_of_before() -> None:
    before = c10d._world
    end = simulate(knows_its_own_groups, [[0, 1, 2, 3]], 5)
    assert [each.result for each in end.ranks] == [(1, 0), (1, 1), (5, 0), (5, 1)]
    assert c10d._world is before
    assert not dist.is_initialized()
