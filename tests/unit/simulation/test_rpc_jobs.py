"""Simulated jobs of RPC."""

from dataclasses import dataclass
from typing import Any

import pytest
from support.simulation.machine.job import simulate
from support.simulation.programs.rpc import LATE_SECONDS, take_long, worker
from support.simulation.run import Draw, what_is_wrong

from hvlike import rpc
from hvlike.system.system import system


def test_random_jobs() -> None:
    for seed in range(6):
        job = Draw.of(seed, ["rpc"], range(2, 4), range(1, 3))
        wrong = what_is_wrong(job.run(), job)
        assert wrong is None, f"{job}\n{wrong}"


@pytest.mark.parametrize("seed", [5, 23, 31, 37])
def test_workers_that_leave_while_others_call_them(seed: int) -> None:
    """Threads that still used RRefs died, and one waited for ever."""
    job = Draw.of(seed, ["leavers"], range(2, 5), range(1, 4))
    wrong = what_is_wrong(job.run(), job)
    assert wrong is None, f"{job}\n{wrong}"


def answers_after_its_session(hvd: Any, rank: int) -> None:
    """A function ends in the session that follows the one of its caller, and returns an RRef of that one."""
    rpc.init_rpc(worker(rank))
    rpc.rpc_async(worker(rank), take_long, (LATE_SECONDS,))
    system.sleep(LATE_SECONDS / 2)
    rpc.shutdown(graceful=False)
    rpc.init_rpc(worker(rank))
    rpc.api._set_leak_checking(True)
    system.sleep(LATE_SECONDS)
    rpc.shutdown()
    hvd.shutdown()


def test_an_answer_that_outlives_its_session_leaves_nothing_in_the_next_one() -> None:
    """Once the RRef in it counted as sent, and the owner kept its value until the end of the later session."""
    (end,) = simulate(answers_after_its_session, [[0]], 1).ranks
    assert end.error is None, end.trace


def leaves_at_once(hvd: Any, rank: int) -> list[int]:
    """All ranks end the session without waiting for each other, after one of them has led a gathering."""
    rpc.init_rpc(worker(rank))
    rpc._barrier()
    hvd.barrier()
    rpc.shutdown(graceful=False)
    found: list[int] = hvd.allgather_object(rank)
    hvd.shutdown()
    return found


def test_workers_that_leave_at_the_same_time_do_not_end_each_others_loop() -> None:
    """Once rank 0 heard of the other's end after its own, in the loop, and asked for the session that was over."""
    for seed in range(46, 56):
        end = simulate(leaves_at_once, [[0, 1]], seed, points_per_switch=3.0, most_seconds=100.0)
        for rank in end.ranks:
            assert rank.error is None, rank.trace
            assert rank.result == [0, 1]


@dataclass
class LeavesAsAnAnswerComes:
    """The answer, an RRef, of a call whose time was over comes while the session ends."""

    pause: float

    def __call__(self, hvd: Any, rank: int) -> None:
        rpc.init_rpc(worker(rank))
        with pytest.raises(RuntimeError, match="set timeout"):
            rpc.rpc_sync(worker(rank), take_long, (4e-3,), timeout=2e-3)
        system.sleep(self.pause)
        rpc.shutdown(graceful=False)
        hvd.shutdown()


@pytest.mark.parametrize("microseconds", range(2000, 2400, 50))
def test_an_answer_that_comes_as_the_session_ends_does_not_end_a_thread(microseconds: int) -> None:
    """Once the thread that was to release its RRefs asked for the session that was over: one thread less listened."""
    for seed in range(6):
        (end,) = simulate(LeavesAsAnAnswerComes(1e-6 * microseconds), [[0]], seed, points_per_switch=3.0).ranks
        assert end.error is None, end.trace
