"""Hundreds of groups, made and destroyed: nothing of them stays."""

import gc
import os
import resource
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from support.torch_distributed.backend import World, beyond_gloo

GROUPS = 300
# What a group may leave behind: the records that torch and MPI keep.
KIB_OF_A_GROUP = 20


def held() -> tuple[int, int, int]:
    """Open files, files in /dev/shm that are ours, and threads."""
    gc.collect()
    ours = sum(f"{os.getpid()}" in path.name for path in Path("/dev/shm").iterdir())
    return len(os.listdir("/proc/self/fd")), ours, threading.active_count()


def use(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == group.size()


def make(world: World, number: int) -> None:
    """Groups of all, of all but one, and of one rank."""
    outside = number % (world.size + 1)
    ranks = [rank for rank in range(world.size) if rank != outside] or [0]
    group = dist.new_group(ranks, use_local_synchronization=number % 2 == 0)
    if world.rank in ranks:
        use(group)
        dist.destroy_process_group(group)


@beyond_gloo
def test_groups_leave_nothing_behind(world: World) -> None:
    for number in range(20):
        make(world, number)
    before, memory = held(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(GROUPS):
        make(world, number)
    dist.barrier()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert held() == before
    assert grown < KIB_OF_A_GROUP * GROUPS


def test_many_groups_live_at_once(world: World) -> None:
    groups = [dist.new_group() for _ in range(60)]
    works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)
