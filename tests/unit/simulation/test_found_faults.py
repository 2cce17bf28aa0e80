"""Faults that simulated jobs have found, each with a job that showed it."""

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulation.machine.job import JobEnd, Kill, simulate
from support.simulation.programs.autograd import Autograd
from support.simulation.programs.bells import Bells
from support.simulation.programs.calls import Call, Threads
from support.simulation.programs.collectives import Mistaken, Named, Uneven
from support.simulation.programs.elastic import Elastic
from support.simulation.programs.lost import Lost
from support.simulation.programs.prompt import Prompt, Round
from support.simulation.programs.rpc import LATE_SECONDS, Rpc, take_long, worker
from support.simulation.run import Draw, what_is_wrong

from hvlike import rpc
from hvlike.system.system import system


def test_a_rank_that_is_held_up_at_the_end_passes_on_what_it_got() -> None:
    """Rank 2 hears of errors by rank 1, which has left and stands still while the others leave. No message is buffered:
    a send ends when its receiver takes it.
    """
    program, nodes = Mistaken(["leaves"], [1]), [[0], [1, 2]]
    for points in (4920, 6360, 7000, 8000, 9920):
        job = Draw(35, "mistakes", nodes, 40.0, [(points, 1, 3.0)], False, {"eager_limit": 0})
        assert what_is_wrong(job.run(program), job) is None, points


def test_who_sees_that_a_rank_has_arrived_sees_at_what() -> None:
    """Of processors that reorder stores (ARM): others saw the number of a work before its stamp, and took it for other
    work.
    """
    job = Draw(
        19, "named", [[0, 1, 2, 3]], 40.0, [], True, {"eager_limit": 65536, "senders_must_call": True}, "reordered"
    )
    assert what_is_wrong(job.run(Named.draw(19, 4)), job) is None


def test_who_sees_that_a_rank_has_come_to_an_operation_sees_its_entry_on_the_board() -> None:
    """Of processors that reorder stores: a rank took another one for passed, and waited for it by negotiation."""
    mpi = {"eager_limit": 4096, "senders_must_call": True, "roots_run_ahead": True, "sockets_tell": True}
    job = Draw(20, "join", [[0, 1, 2, 3]], 10.0, [(3326, 2, 3.0)], True, mpi, "reordered")
    assert what_is_wrong(job.run(Uneven.draw(20, 4)), job) is None


def test_who_is_held_up_as_the_session_of_rpc_ends_does_not_take_the_others_for_vanished() -> None:
    """All was over, the others had left hvlike, too, and this rank heard of both at once."""
    mpi = {"eager_limit": 4096, "senders_must_call": True, "roots_run_ahead": False, "sockets_tell": False}
    holds = [(14209, 0, 3.0), (17404, 2, 3.0), (18692, 1, 0.002)]
    job = Draw(100130, "rpc", [[0, 1], [2]], 3.0, holds, True, mpi, "reordered")
    assert what_is_wrong(job.run(Rpc.draw(100130, 3)), job) is None


def test_a_request_that_comes_before_its_process_set_is_kept_beside_groups_of_torch() -> None:
    """Their sets have larger numbers, and the others counted as old ones: DeadlockError though all asked."""
    mpi = {"eager_limit": 4096, "senders_must_call": False, "roots_run_ahead": True, "sockets_tell": True}
    program = Lost(["set", "torch", "named", "rpc"], 0, "raises", 3, "raise", 0.02, 1374)
    job = Draw(1374, "lost", [[0], [1], [2, 3, 4]], 200.0, [], False, mpi, "in order")
    assert what_is_wrong(job.run(program), job) is None


def test_a_rank_that_is_lost_gives_the_promised_error_to_who_hears_of_it_by_others() -> None:
    """By a rank of its node, or of its group of torch, that met the loss first; and as what it sent was being read."""
    mpi = {"eager_limit": 262144, "senders_must_call": False, "roots_run_ahead": True, "sockets_tell": True}
    steps = ["barrier", "torch", "objects", "barrier", "set", "torch", "set"]
    program = Lost(steps, 1, "killed", 2714, "raise", 20.0, 254)
    job = Draw(254, "lost", [[0, 1], [2, 3]], 10.0, [(7121, 0, 3.0)], True, mpi, "at once")
    assert what_is_wrong(job.run(program), job) is None
    mpi = {"eager_limit": 0, "senders_must_call": True, "roots_run_ahead": True, "sockets_tell": True}
    program = Lost(["inline", "inline"], 2, "killed", 3173, "raise", 20.0, 20623)
    job = Draw(20623, "lost", [[0], [1, 2, 3]], 200.0, [], True, mpi, "reordered")
    assert what_is_wrong(job.run(program), job) is None
    mpi = {"eager_limit": 4096, "senders_must_call": False, "roots_run_ahead": True, "sockets_tell": True}
    program = Lost(["message", "objects"], 2, "killed", 1595, "raise", 20.0, 20828)
    job = Draw(20828, "lost", [[0, 1, 2, 3]], 10.0, [], True, mpi, "reordered")
    assert what_is_wrong(job.run(program), job) is None


def test_the_end_of_a_job_does_not_wait_for_what_was_sent_to_a_rank_that_is_cut_off() -> None:
    mpi = {"eager_limit": 0, "senders_must_call": True, "roots_run_ahead": False, "sockets_tell": False}
    job = Draw(20047, "elastic", [[0], [1]], 40.0, [], False, mpi, "reordered")
    for points in (620, 660, 700):
        program = Elastic(steps=3, commit_every=1, way="cut", culprits=[0], points=[points], at=2, spares=0)
        assert what_is_wrong(job.run(program), job) is None, points


def test_a_background_driver_hears_what_was_posted_before_others_saw_it_drive() -> None:
    """Its word was still in its store buffer: the ring went to a thread that sleeps while no thread drives."""
    mpi = {"eager_limit": 262144, "senders_must_call": True, "roots_run_ahead": False, "sockets_tell": False}
    job = Draw(70000880, "bells", [[0, 1, 2]], 10.0, [], False, mpi, "in order", 300.0, [(455, 2, 0.01)])
    assert what_is_wrong(job.run(Bells.draw(70000880, 3, rounds=(2, 8))), job) is None


def test_a_background_thread_that_runs_an_item_lets_others_hear_the_ring_that_woke_it() -> None:
    """The ring was for a message. Another thread had left the loop for the item, and found it taken; nobody looked for
    the message until a quarter of a second had passed.
    """
    mpi = {"eager_limit": 65536, "senders_must_call": True, "roots_run_ahead": True, "sockets_tell": True}
    job = Draw(44, "autograd", [[0, 1, 2, 3]], 3.0, [], True, mpi, "in order")
    assert what_is_wrong(job.run(Autograd.draw(44, 4)), job) is None
    mpi = {"eager_limit": 262144, "senders_must_call": False, "roots_run_ahead": True, "sockets_tell": False}
    job = Draw(169, "autograd", [[0, 1, 2, 3]], 40.0, [], True, mpi, "in order")
    assert what_is_wrong(job.run(Autograd.draw(169, 4)), job) is None


def reduces_under_one_name(hvd: Any, rank: int) -> bool:
    hvd.init()
    for _ in range(5):
        hvd.allreduce(torch.ones(4), name="loss")
    hvd.shutdown()
    return True


def test_a_rank_that_stands_still_in_an_operation_is_in_no_deadlock_with_the_next_one_of_that_name() -> None:
    """It waits for the end of what was agreed, and the others for its next request: DeadlockError."""
    for points in (1700, 1800, 1915, 2000, 2100):
        end = simulate(reduces_under_one_name, [[0, 1, 2]], 1, holds=[(points, 1, 4.0)])
        assert all(each.result for each in end.ranks), [each.trace for each in end.ranks]


def exchanges(hvd: Any, rank: int) -> bool:
    hvd.init()
    hvd.alltoall(torch.ones(3 * hvd.size()))
    hvd.shutdown()
    return True


def test_those_that_have_done_their_part_of_an_operation_may_leave_while_a_rank_stands_still_in_it() -> None:
    """Those who wait for that rank took the ones that had left for missing: ShutdownError."""
    for points in (900, 938, 970, 1000, 1040):
        end = simulate(exchanges, [[0, 1], [2]], 1, holds=[(points, 1, 4.0)])
        assert all(each.result for each in end.ranks), [each.trace for each in end.ranks]


def test_a_thread_that_has_asked_for_nothing_yet_can_end_what_looks_like_a_deadlock() -> None:
    """All ranks waited, and on each one thread had used hvlike: DeadlockError, while another thread was about to."""
    threads = Threads([("sum", 4, 1), ("sum", 4, 1)], [[0, 0], [1, 0]], [{}, {0: 0.9}])
    end = simulate(threads, [[0, 1]], 1)
    assert [each.trace for each in end.ranks] == ["", ""]


def test_the_rank_that_joins_last_has_made_all_steps() -> None:
    """Rank 0 trains longer, and its own request comes first: all got the parameters of rank 1."""
    for seed in range(6):
        end = simulate(Uneven([[2, 1]], [True], [0]), [[0], [1]], seed)
        assert [each.trace for each in end.ranks] == ["", ""]


def leaves_on_rank_1(hvd: Any, rank: int) -> str | None:
    hvd.init()
    try:
        if rank != 1:
            hvd.allreduce(torch.ones(3), name="x")
    except hvd.HorovodInternalError as error:
        return type(error).__name__
    finally:
        hvd.shutdown()
    return None


def test_who_leaves_while_others_are_still_in_init_is_not_forgotten() -> None:
    """Rank 2 is late, and with it rank 0, while rank 1 is through and leaves: the others waited for it for ever."""
    for points in (300, 400, 500, 600):
        end = simulate(leaves_on_rank_1, [[0, 1], [2]], 1, holds=[(points, 2, 4.0)], most_seconds=20.0)
        assert [each.result for each in end.ranks] == ["ShutdownError", None, "ShutdownError"], points


def receives_from_any_rank(hvd: Any, rank: int) -> list[Any]:
    """Rank 0 wants one tensor more than there are; rank 2 sends when rank 1 has been gone for long."""
    found: list[Any] = []
    dist.init_process_group("hvlike")
    if rank == 0:
        try:
            while True:
                found.append(dist.recv(torch.zeros(3)))
        except hvd.HorovodInternalError as error:
            return [*found, type(error).__name__]
        finally:
            hvd.shutdown()
    if rank == 2:
        system.sleep(5.0)
    dist.send(torch.ones(3), 0)
    hvd.shutdown()
    return found


def test_a_receive_from_any_rank_goes_on_when_one_has_left_and_ends_when_all_have() -> None:
    for nodes in ([[0, 1, 2]], [[0], [1, 2]]):
        end = simulate(receives_from_any_rank, nodes, 1)
        assert end.ranks[0].result == [1, 2, "ShutdownError"], end.ranks[0].trace


def reduces(hvd: Any, rank: int) -> None:
    """Reduce again and again."""
    hvd.init()
    for number in range(100):
        hvd.allreduce(torch.ones(3), name=f"number {number}")
    hvd.shutdown()


def endings(end: JobEnd) -> list[str]:
    return [type(each.error).__name__ if each.ended else "killed" for each in end.ranks]


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


FAULT_TOLERANT = {"OMPI_MCA_mpi_ft_enable": "1"}


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


def test_a_thread_that_was_to_drive_next_and_has_nothing_to_wait_for_any_more_leaves_that_to_another() -> None:
    """The background thread gave way to it; what it had begun before the barrier took until the next look around."""
    call = Call("allreduce", None, 1, torch.float32, 0, "", 0, 1)
    barrier = Call("barrier", "loss", 20000, torch.float32, 1, "", 0, 1)
    rounds = [
        Round(call, 5, [], [1], {0: 0.001012132176465062}),
        Round(barrier, 5, [700], [0], {1: 8.078860998751577e-05}),
    ]
    mpi = {"eager_limit": 4096, "senders_must_call": True, "roots_run_ahead": False, "sockets_tell": True}
    job = Draw(66017289, "prompt", [[0, 1]], 40.0, [(714, 1, 0.01)], True, mpi, "reordered")
    assert what_is_wrong(job.run(Prompt(rounds)), job) is None
