"""The simulated MPI does what MPI promises, no more than that, and the same again for the same seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.simulation.machine.mpi_alone import LARGE, ONE_NODE, TWO_NODES, numbers, poll, run
from support.simulation.machine.simulated_mpi import MpiError, SimulatedMpi
from support.simulation.machine.simulated_ulfm import Failures

# -- point to point ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("calls", [False, True])
def test_messages_of_a_pair_stay_in_order_and_those_of_others_need_not(seed: int, calls: bool) -> None:
    sizes = [8, LARGE, 16, 0, LARGE, 4096, 4097]
    heard: list[tuple[int, int]] = []

    def send(mpi: Any) -> None:
        comm = mpi.COMM_WORLD
        poll(*[comm.Isend([numbers(size, comm.rank), mpi.BYTE], 2, tag=1) for size in sizes])

    def receive(mpi: Any) -> None:
        status = mpi.Status()
        while len(heard) < 2 * len(sizes):
            message = mpi.COMM_WORLD.Improbe(tag=1, status=status)
            if message is not None:
                source, count = status.Get_source(), status.Get_count(mpi.BYTE)
                buffer = np.zeros(count, np.uint8)
                poll(message.Irecv([buffer, mpi.BYTE]))
                assert np.array_equal(buffer, numbers(count, source))
                heard.append((source, count))

    run(TWO_NODES, send, send, receive, seed=seed, prepare=lambda job: vars(job).update(senders_must_call=calls))
    for source in (0, 1):
        assert [size for each, size in heard if each == source] == sizes


def test_the_sources_come_in_different_orders() -> None:
    def first_source(seed: int) -> int:
        found: list[int] = []

        def receive(mpi: Any) -> None:
            status = mpi.Status()
            while mpi.COMM_WORLD.Improbe(status=status) is None:
                pass
            found.append(status.Get_source())

        def send(mpi: Any) -> None:
            poll(mpi.COMM_WORLD.Isend([numbers(8), mpi.BYTE], 2))

        run(ONE_NODE, send, send, receive, seed=seed)
        return found[0]

    assert {first_source(seed) for seed in range(20)} == {0, 1}


def test_only_a_small_message_leaves_before_anybody_receives_it() -> None:
    left = []

    def send(mpi: Any) -> None:
        small = mpi.COMM_WORLD.Isend([numbers(4096), mpi.BYTE], 1, 1)
        large = mpi.COMM_WORLD.Isend([numbers(4097), mpi.BYTE], 1, 2)
        small.Wait()
        left.extend([small.Test(), *(large.Test() for _ in range(100))])
        mpi.COMM_WORLD.Barrier()
        poll(large)

    def receive(mpi: Any) -> None:
        mpi.COMM_WORLD.Barrier()
        poll(*[mpi.COMM_WORLD.Irecv([np.zeros(5000, np.uint8), mpi.BYTE], 0, tag) for tag in (2, 1)])

    run([[0], [1]], send, receive)
    assert left == [True] + 100 * [False]


@pytest.mark.parametrize(("nbytes", "waits"), [(8, False), (LARGE, False), (8, True), (LARGE, True)])
def test_who_writes_to_memory_that_is_being_sent_is_found_out(nbytes: int, waits: bool) -> None:
    def received(seed: int) -> bool:
        intact = []

        def send(mpi: Any) -> None:
            memory = numbers(nbytes)
            request = mpi.COMM_WORLD.Isend([memory, mpi.BYTE], 1)
            if waits:
                request.Wait()
            memory[:] = 255
            poll(request)

        def receive(mpi: Any) -> None:
            memory = np.zeros(nbytes, np.uint8)
            poll(mpi.COMM_WORLD.Irecv([memory, mpi.BYTE], 0))
            intact.append(np.array_equal(memory, numbers(nbytes)))

        run([[0], [1]], send, receive, seed=seed)
        return bool(intact[0])

    assert all(received(seed) for seed in range(20)) is waits


def test_memory_is_not_written_before_the_receive_is_over() -> None:
    def receive(mpi: Any) -> None:
        memory = np.zeros(LARGE, np.uint8)
        request = mpi.COMM_WORLD.Irecv([memory, mpi.BYTE], 0)
        while not request.Test():
            assert not memory.any()
        assert memory.any()

    run([[0], [1]], lambda mpi: poll(mpi.COMM_WORLD.Isend([numbers(LARGE), mpi.BYTE], 1)), receive)


@pytest.mark.parametrize(("nodes", "least", "most"), [([[0, 1]], 1e-6, 20e-6), ([[0], [1]], 10e-6, 200e-6)])
def test_a_message_takes_its_time(nodes: list[list[int]], least: float, most: float) -> None:
    seconds = []

    def prepare(job: SimulatedMpi) -> None:
        job.trace = lambda text: seconds.append(job.scheduler.now)

    for seed in range(20):
        seconds.clear()
        run(
            nodes,
            lambda mpi: mpi.COMM_WORLD.Isend([numbers(8), mpi.BYTE], 1),
            lambda mpi: mpi.COMM_WORLD.Irecv([np.zeros(8, np.uint8), mpi.BYTE], 0).Wait(),
            seed=seed,
            prepare=prepare,
        )
        sent, matched, delivered = seconds
        assert least <= matched - sent <= most + 5e-6
        assert delivered == matched


def test_a_receive_takes_the_first_message_that_fits() -> None:
    def receive(mpi: Any) -> None:
        comm, buffers = mpi.COMM_WORLD, [bytearray(1) for _ in range(4)]
        wanted = [(0, 5), (mpi.ANY_SOURCE, 6), (0, mpi.ANY_TAG), (0, mpi.ANY_TAG)]
        poll(*[comm.Irecv(buffer, *each) for buffer, each in zip(buffers, wanted, strict=True)])
        assert [bytes(each) for each in buffers] == [b"b", b"c", b"a", b"d"]

    def send(mpi: Any) -> None:
        poll(*[mpi.COMM_WORLD.Isend(text, 1, tag) for text, tag in ((b"a", 4), (b"b", 5), (b"c", 6), (b"d", 5))])

    run([[0], [1]], send, receive)


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_a_message_that_is_too_long_raises(nbytes: int) -> None:
    def receive(mpi: Any) -> None:
        memory = np.zeros(nbytes, np.uint8)
        request = mpi.COMM_WORLD.Irecv([memory[:-1], mpi.BYTE], 0)
        with pytest.raises(mpi.Exception, match="MPI_ERR_TRUNCATE: message truncated: 0 -> 1") as caught:
            poll(request)
        assert isinstance(caught.value, MpiError)
        assert caught.value.Get_error_class() == mpi.ERR_TRUNCATE
        assert memory.tolist() == [*numbers(nbytes - 1), 0]
        assert request.Test()

    run([[0], [1]], lambda mpi: poll(mpi.COMM_WORLD.Isend([numbers(nbytes), mpi.BYTE], 1)), receive)


def test_persistent_requests_are_started_again_and_again() -> None:
    def send(mpi: Any) -> None:
        memory = np.zeros(LARGE, np.uint8)
        request = mpi.COMM_WORLD.Send_init([memory, mpi.BYTE], 1, 3)
        assert request.Test()
        for turn in range(5):
            memory[:] = turn
            request.Start()
            poll(request)
        request.Free()

    def receive(mpi: Any) -> None:
        memory = np.zeros(LARGE, np.uint8)
        request = mpi.COMM_WORLD.Recv_init([memory, mpi.BYTE], 0, 3)
        for turn in range(5):
            request.Start()
            request.Wait()
            assert (memory == turn).all()
        request.Start()
        request.Cancel()
        request.Wait()
        request.Free()

    run([[0], [1]], send, receive)


# -- lost ranks -------------------------------------------------------------------------------------


def lose(mpi: Any) -> None:
    """End the process of this rank here."""
    job = mpi.job
    job.lose(mpi.job_rank)
    job.scheduler.lose(mpi.job_rank)


def test_what_a_lost_rank_had_sent_arrives_if_it_was_buffered() -> None:
    def lost(mpi: Any) -> None:
        mpi.COMM_WORLD.Isend([numbers(8), mpi.BYTE], 1, 1).Wait()
        mpi.COMM_WORLD.Isend([numbers(LARGE), mpi.BYTE], 1, 2)
        lose(mpi)

    def other(mpi: Any) -> None:
        comm, status = mpi.COMM_WORLD, mpi.Status()
        memory = np.zeros(8, np.uint8)
        poll(comm.Irecv([memory, mpi.BYTE], 0, 1))
        assert np.array_equal(memory, numbers(8))
        message = None
        while message is None:
            message = comm.Improbe(tag=2, status=status)
        assert status.Get_count(mpi.BYTE) == LARGE
        rest = message.Irecv([np.zeros(LARGE, np.uint8), mpi.BYTE])
        assert not any(rest.Test() for _ in range(1000))
        poll(comm.Isend([numbers(8), mpi.BYTE], 0))
        together = comm.Ibcast([numbers(8), mpi.BYTE], 1)
        request = comm.Isend([numbers(LARGE), mpi.BYTE], 0)
        assert not any(each.Test() for _ in range(1000) for each in (request, together))

    for seed in range(10):
        run([[0], [1]], lost, other, seed=seed)


def test_what_the_threads_of_a_lost_rank_still_call_has_no_effect() -> None:
    lines: list[str] = []

    def program(mpi: Any) -> None:
        mpi.job.trace = lines.append
        mpi.job.lose(0)
        mpi.COMM_WORLD.Isend(b"x", 0)

    with pytest.raises(AssertionError, match=r"rank 0 main: mpi\.Isend"):
        run([[0]], program)
    assert lines == ["lost rank 0"]


def test_what_a_lost_rank_has_just_sent_may_arrive_or_not() -> None:
    def arrives(seed: int) -> bool:
        found: list[bool] = []

        def lost(mpi: Any) -> None:
            mpi.COMM_WORLD.Isend([numbers(8), mpi.BYTE], 1, 1)
            lose(mpi)

        def other(mpi: Any) -> None:
            found.append(any(mpi.COMM_WORLD.Iprobe() for _ in range(1000)))

        run([[0, 1]], lost, other, seed=seed)
        return found[0]

    assert {arrives(seed) for seed in range(20)} == {False, True}


def test_a_collective_that_a_lost_rank_has_called_is_not_over() -> None:
    def lost(mpi: Any) -> None:
        mpi.COMM_WORLD.Iallreduce(np.ones(1), np.ones(1))
        lose(mpi)

    def other(mpi: Any) -> None:
        while not mpi.job.lost_at:
            mpi.COMM_WORLD.Iprobe()
        request = mpi.COMM_WORLD.Iallreduce(np.ones(1), np.ones(1))
        assert not any(request.Test() for _ in range(1000))

    run([[0, 1]], lost, other)


def test_who_waits_for_a_lost_rank_waits_for_ever() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 main: mpi\.Barrier"):
        run([[0, 1]], lose, lambda mpi: mpi.COMM_WORLD.Barrier())


@pytest.mark.parametrize("seed", range(10))
def test_under_ulfm_a_call_hears_of_a_loss_that_was_noticed_while_its_rank_was_held_up(seed: int) -> None:
    def lost(mpi: Any) -> None:
        while "Barrier" not in str(mpi.job.scheduler.threads[0].what):
            mpi.COMM_WORLD.Iprobe()
        mpi.job.scheduler.hold(0, 3.0)
        lose(mpi)

    def other(mpi: Any) -> None:
        with pytest.raises(MpiError, match="rank 1 is lost"):
            mpi.COMM_WORLD.Barrier()

    run([[0], [1]], other, lost, seed=seed, prepare=lambda job: vars(job).update(failures=Failures(job)))


# -- the same again ---------------------------------------------------------------------------------


def test_a_seed_decides_everything() -> None:
    def program(mpi: Any) -> None:
        comm = mpi.COMM_WORLD
        sends = [comm.Isend([numbers(size), mpi.BYTE], peer, size) for peer in range(3) for size in (8, LARGE)]
        receives = [comm.Irecv(np.zeros(size, np.uint8), tag=size) for _ in range(3) for size in (8, LARGE)]
        poll(*sends, *receives, comm.Idup()[1])

    def story(seed: int) -> list[str]:
        lines: list[str] = []

        def prepare(job: SimulatedMpi) -> None:
            job.trace = lambda text: lines.append(f"{job.scheduler.now:.9f} {text}")

        run(TWO_NODES, program, seed=seed, prepare=prepare)
        return lines

    assert story(1) == story(1)
    assert story(1) != story(2)
    assert [line.split()[1] for line in story(1)].count("delivered") == 18
