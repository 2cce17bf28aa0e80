"""Whole jobs of simulated ranks: hangs are told, ranks at rest cost nothing, control messages are counted."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from support.simulation.machine import scheduler
from support.simulation.machine.job import simulate
from support.simulation.machine.simulated_mpi import SimulatedMpi
from support.simulation.machine.simulated_thread import JobEnded, Stuck
from support.simulation.scale import measure

from hvlike.system.system import system


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


def test_a_thread_that_waits_for_what_is_not_simulated_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STUCK_SECONDS", 0.2)
    outside = threading.Event()

    def waits_outside(hvd: Any, rank: int) -> None:
        if rank == 1:
            outside.wait()
            raise JobEnded

    before = threading.enumerate()
    with pytest.raises(Stuck, match=r"^rank 1 main keeps the turn at point \d+: .*waits_outside"):
        simulate(waits_outside, [[0, 1]], 1)
    outside.set()
    for left in set(threading.enumerate()).difference(before):
        # Not the simulated join.
        threading.Thread.join(left, 20)
        assert not threading.Thread.is_alive(left)


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


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (6, 3)])
def test_a_named_operation_takes_one_message_of_each_host_and_a_steady_step_none(hosts: int, ranks: int) -> None:
    phases = measure(hosts, ranks).phases
    # Two named operations: the ranks of the first host tell rank 0 themselves, and a rank speaks for each other host.
    assert phases["named operation"].got[0] == 2 * (ranks - 1 + hosts - 1)
    assert phases["steady steps"].total == 0
    assert phases["init"].most_sent <= 2 * ranks
    # The end takes one of each host, too, and tells each host once.
    assert phases["shutdown"].got[0] == ranks - 1 + hosts - 1
    assert phases["shutdown"].most_sent == ranks - 1 + hosts - 1


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


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_stops_in_the_middle_of_a_message_holds_up_no_other(seed: int) -> None:
    machine: list[SimulatedMpi] = []

    def prepare(mpi: SimulatedMpi) -> None:
        """MPI sends what is long only while it is called."""
        mpi.senders_must_call = True
        machine.append(mpi)

    def program(hvd: Any, rank: int) -> dict[int, float]:
        """Rank 1 begins to send a long message, and stops; rank 2 sends a short one."""
        hvd.init()
        from hvlike.collectives.session.context import current

        def stop_while_sending() -> None:
            fabric.channel.send(0, 900, bytes(100_000))
            machine[0].scheduler.hold(rank, 3.0)

        fabric, come = current().fabric, dict[int, float]()
        fabric.channel.listen(900, lambda source, value, tensors: come.setdefault(source, system.monotonic()))
        hvd.barrier()
        begun = system.monotonic()
        if rank == 0:
            fabric.loop.wait(lambda: len(come) == 2)
        elif rank == 1:
            fabric.loop.perform(stop_while_sending)
        else:
            system.sleep(0.5)
            fabric.channel.send_soon(0, 900, "short")
        hvd.shutdown()
        return {source: moment - begun for source, moment in come.items()}

    end = simulate(program, [[0], [1], [2]], seed, prepare=prepare)
    assert end.hang is None, end.hang
    came = end.ranks[0].result
    assert came[2] < 1.0
    assert came[1] >= 2.9
