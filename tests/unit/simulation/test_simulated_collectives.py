"""Collectives and new communicators of the simulated MPI, and the uses of MPI that it refuses."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from support.simulation.machine.mpi_alone import (
    LARGE,
    ONE_NODE,
    TWO_NODES,
    Program,
    numbers,
    poll,
    run,
    run_threads,
)
from support.simulation.machine.simulated_mpi import ProcessEnded, SimulatedMpi

# -- collectives ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_collectives_have_the_results_of_mpi(seed: int, ahead: bool) -> None:
    def program(mpi: Any) -> None:
        comm = mpi.COMM_WORLD
        rank = comm.Get_rank()
        assert comm.bcast({"from": rank}, root=1) == {"from": 1}
        assert comm.allgather([rank]) == [[0], [1], [2]]
        assert comm.gather(rank, root=2) == ([0, 1, 2] if rank == 2 else None)
        lowest = array.array("i", [rank])
        comm.Bcast([lowest, mpi.INT], root=2)
        found = array.array("i", [0] * 3)
        comm.Allgather([array.array("i", [7 * rank]), mpi.INT], [found, mpi.INT])
        assert (lowest[0], found.tolist()) == (2, [0, 7, 14])
        most, total = np.array([rank, -rank]), np.zeros(2, np.int64)
        bytes_of_most = most.view(np.uint8)
        text, huge = (numbers(size) if rank == 0 else np.zeros(size, np.uint8) for size in (100, LARGE))
        requests = [comm.Iallreduce(most.copy(), total, mpi.SUM), comm.Ibcast([text, mpi.BYTE], 0)]
        requests += [comm.Iallreduce(mpi.IN_PLACE, [bytes_of_most, 2, mpi.INT64_T], mpi.MAX), comm.Ibcast(huge)]
        poll(*reversed(requests))
        assert (total.tolist(), most.tolist()) == ([3, -3], [2, 0])
        assert np.array_equal(text, numbers(100))
        assert np.array_equal(huge, numbers(LARGE))
        comm.Barrier()

    run(TWO_NODES, program, seed=seed, prepare=lambda job: vars(job).update(roots_run_ahead=ahead))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_root_runs_ahead_only_if_asked_to(ahead: bool) -> None:
    def root(mpi: Any) -> None:
        mpi.COMM_WORLD.bcast(1)
        mpi.COMM_WORLD.Isend(b"x", 1)

    def other(mpi: Any) -> None:
        mpi.COMM_WORLD.Irecv(bytearray(1), 0).Wait()
        mpi.COMM_WORLD.bcast()

    def job() -> SimulatedMpi:
        return run([[0], [1]], root, other, prepare=lambda job: vars(job).update(roots_run_ahead=ahead))

    if ahead:
        job()
    else:
        with pytest.raises(AssertionError, match=r"rank 0 main: mpi\.bcast\nrank 1 main: mpi\.Wait"):
            job()


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (lambda mpi: mpi.COMM_WORLD.Ibcast(numbers(9)), "rank 0 calls Ibcast of 8 bytes from 0, .*Ibcast of 9 bytes"),
        (lambda mpi: mpi.COMM_WORLD.Ibcast(numbers(8), 1), "rank 0 calls Ibcast of 8 bytes from 0, .*from 1"),
        (lambda mpi: mpi.COMM_WORLD.Barrier(), "collective 0 on MPI_COMM_WORLD#0: rank 0 calls Ibcast.*calls Barrier"),
    ],
)
def test_collectives_that_differ_name_the_ranks(others: Program, text: str) -> None:
    def first(mpi: Any) -> None:
        poll(mpi.COMM_WORLD.Ibcast(numbers(8)))

    with pytest.raises(AssertionError, match=text):
        run(ONE_NODE, first, others, others, seed=3)


def test_new_communicators_have_the_ranks_that_they_should() -> None:
    def program(mpi: Any) -> None:
        world = mpi.COMM_WORLD
        rank = world.rank
        node = world.Split_type(mpi.COMM_TYPE_SHARED, key=rank)
        assert (node.rank, node.size) == ((rank, 2) if rank < 2 else (0, 1))
        reverse = world.Split(0, key=-rank)
        assert reverse.allgather(rank) == [2, 1, 0]
        some = world.Split(mpi.UNDEFINED if rank == 1 else 5, rank)
        assert (some == mpi.COMM_NULL) is (rank == 1)
        everybody = world.Get_group()
        pair = everybody.Incl([2, 0])
        if rank != 1:
            made = world.Create_group(pair, tag=4)
            assert made.allgather(rank) == [2, 0]
            assert mpi.Group.Translate_ranks(made.Get_group(), [0, 1], everybody) == [2, 0]
            assert mpi.Group.Translate_ranks(everybody, [0, 1], pair) == [1, mpi.UNDEFINED]
            made.Free()
            assert made == mpi.COMM_NULL
        assert world.Dup().allgather(rank) == [0, 1, 2]
        copy, request = reverse.Idup()
        poll(request)
        copy.Set_errhandler(mpi.ERRORS_RETURN)
        assert copy.bcast(rank) == 2
        assert copy != reverse
        assert isinstance(copy, mpi.Comm)
        assert isinstance(copy, mpi.Intracomm)
        assert mpi.COMM_SELF.allgather(rank) == [rank]
        assert mpi.Get_processor_name() == f"node{rank // 2}"

    run(TWO_NODES, program)


# -- mistakes ---------------------------------------------------------------------------------------


def _twice_started(mpi: Any) -> None:
    request = mpi.COMM_WORLD.Recv_init(bytearray(1), 0, 1)
    request.Start()
    request.Start()


def _freed_request(mpi: Any) -> None:
    request = mpi.COMM_WORLD.Send_init(b"x", 0, 1)
    request.Free()
    request.Test()


def _freed_twice(mpi: Any) -> None:
    request = mpi.COMM_WORLD.Isend(b"x", 0, 1)
    request.Wait()
    request.Free()


def _freed_communicator(mpi: Any) -> None:
    comm = mpi.COMM_WORLD.Dup()
    comm.Free()
    comm.Isend(b"x", 0)


def _freed_communicator_twice(mpi: Any) -> None:
    comm = mpi.COMM_WORLD.Dup()
    comm.Free()
    comm.Free()


def _too_early(mpi: Any) -> None:
    mpi.COMM_WORLD.Idup()[0].Get_rank()


def _to_nobody(mpi: Any) -> None:
    mpi.COMM_WORLD.Isend(b"x", 1)


def _read_only(mpi: Any) -> None:
    mpi.COMM_WORLD.Irecv([b"x", mpi.BYTE], 0)


def _in_pieces(mpi: Any) -> None:
    mpi.COMM_WORLD.Isend([numbers(8)[::2], mpi.BYTE], 0)


def _too_short(mpi: Any) -> None:
    mpi.COMM_WORLD.Isend([numbers(8), 9, mpi.BYTE], 0)


def _after_the_end(mpi: Any) -> None:
    mpi.Finalize()
    assert mpi.Is_finalized()
    mpi.COMM_WORLD.Barrier()


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (_twice_started, "Start of a request that is under way: receive of rank 0"),
        (_freed_request, "Test of a request after its Free: send 0 -> 0, tag 1, 1 bytes"),
        (_freed_twice, "Free of a request that is over"),
        (_freed_communicator, "uses a communicator that it has freed"),
        (_freed_communicator_twice, "uses a communicator that it has freed"),
        (_too_early, "uses a duplicate before its Idup is over"),
        (_to_nobody, "names position 1, tag 0 on MPI_COMM_WORLD"),
        (_read_only, "is only to be read"),
        (_in_pieces, "memory in pieces"),
        (_too_short, "8 bytes of memory for 9 bytes of BYTE"),
        (_after_the_end, "Barrier after Finalize"),
    ],
)
def test_mistakes_are_refused(mistake: Program, text: str) -> None:
    jobs: list[SimulatedMpi] = []
    with pytest.raises(AssertionError, match=text):
        run([[0]], mistake, prepare=jobs.append)
    assert len(jobs[0].violations) == 1


def test_two_threads_of_a_rank_must_not_call_at_the_same_time() -> None:
    def call(mpi: Any) -> None:
        for _ in range(10):
            mpi.COMM_WORLD.Iprobe()

    def run_both(level: int) -> None:
        run_threads([[0]], [(0, call), (0, call)], prepare=lambda job: vars(job).update(thread_level=level))

    run_both(3)
    with pytest.raises(AssertionError, match="a thread of rank 0 calls Iprobe while another one is in Iprobe"):
        run_both(2)


def test_a_handle_is_used_by_its_own_rank() -> None:
    jobs: list[SimulatedMpi] = []
    with pytest.raises(AssertionError, match=r"rank [01] calls Barrier with an object of rank 2"):
        run(ONE_NODE, lambda mpi: jobs[0].module(2).COMM_WORLD.Barrier(), prepare=jobs.append)


def test_abort_tells_the_simulation_and_never_returns() -> None:
    told: list[tuple[int, int]] = []

    def prepare(job: SimulatedMpi) -> None:
        job.on_abort = lambda *what: told.append(what)

    with pytest.raises(ProcessEnded):
        run([[0]], lambda mpi: mpi.COMM_WORLD.Abort(4), prepare=prepare)
    assert told == [(0, 4)]
