"""Losses without MPI: requests and messages that meet one, agreements of those that are left, whether it is on."""

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvlike.errors import LaunchError
from hvlike.transport.failure.fault_tolerance import EXCLUDED, Job, exclude_collectives, is_enabled
from hvlike.transport.failure.fault_tolerant_comm import FaultTolerantCommunicator, is_failure
from hvlike.transport.loop.coroutine import Wait
from hvlike.transport.messages.channel import HEADER, Channel
from hvlike.transport.messages.traffic import Traffic

ULFM = {"OMPI_MCA_mpi_ft_enable": "1"}


def test_it_is_on_where_mpirun_says_so() -> None:
    assert is_enabled(ULFM)
    assert not is_enabled({})
    assert not is_enabled({"OMPI_MCA_mpi_ft_enable": "0"})


def test_modules_that_return_wrong_sums_are_excluded_before_mpi_starts() -> None:
    environ = dict(ULFM)
    exclude_collectives(environ, initialised=False)
    assert environ["OMPI_MCA_coll"] == EXCLUDED
    without: dict[str, str] = {}
    exclude_collectives(without, initialised=False)
    assert without == {}


@pytest.mark.parametrize("chosen", ["^han", "^cuda,han", "basic,libnbc"])
def test_a_choice_without_them_stays(chosen: str) -> None:
    environ = {**ULFM, "OMPI_MCA_coll": chosen}
    exclude_collectives(environ, initialised=True)
    assert environ["OMPI_MCA_coll"] == chosen


@pytest.mark.parametrize("chosen", [None, "han,basic,libnbc", "^cuda"])
def test_where_they_may_be_in_use_it_says_what_to_add(chosen: str | None) -> None:
    environ = ULFM if chosen is None else {**ULFM, "OMPI_MCA_coll": chosen}
    with pytest.raises(LaunchError, match=r"mpirun --with-ft ulfm --mca coll \^han"):
        exclude_collectives(environ, initialised=True)


def test_what_a_loss_has_left_of_a_pickle_is_a_failure() -> None:
    """Open MPI can end a collective that a loss has cut short without an error and without the data."""
    mpi = SimpleNamespace(Exception=type("Exception", (RuntimeError,), {}))
    for cut in (b"\0\0\0\0", b""):
        with pytest.raises((pickle.UnpicklingError, EOFError)) as raised:
            pickle.loads(cut)
        assert is_failure(mpi, raised.value)
    assert not is_failure(mpi, KeyError("x"))


class MpiError(Exception):
    """An exception of MPI, of one of these classes."""

    LOST, OTHER = 75, 15

    def Get_error_class(self) -> int:
        return int(self.args[0])


MPI: Any = SimpleNamespace(
    Exception=MpiError,
    Status=lambda: SimpleNamespace(Get_error=int),
    ERR_PROC_FAILED=MpiError.LOST,
    ERR_PROC_FAILED_PENDING=76,
    ERR_REVOKED=77,
    ERRORS_RETURN=0,
    COMM_NULL=None,
    COMM_WORLD=SimpleNamespace(rank=0),
    Get_processor_name=lambda: "here",
)


class Started:
    """A request that ends with an error, or well."""

    def __init__(self, error: int | None) -> None:
        self.error = error
        self.freed = False

    def Get_status(self, _: object) -> bool:
        """Say that it has ended, whatever the error."""
        return True

    def Start(self) -> None: ...

    def Test(self) -> bool:
        if self.error is not None:
            raise MpiError(self.error)
        return True

    def Free(self) -> None:
        self.freed = True


def communicator(request: Started, *, revoked: bool = False) -> FaultTolerantCommunicator:
    """A communicator that makes this request."""
    comm: Any = SimpleNamespace(
        **dict.fromkeys(["Recv_init", "Irecv", "Ibcast", "Iallreduce"], lambda *_: request),
        Is_revoked=lambda: revoked,
        Get_failed=lambda: SimpleNamespace(size=0),
    )
    return FaultTolerantCommunicator(MPI, comm, lambda each: each)


def test_a_persistent_request_of_a_lost_rank_never_ends_and_is_not_freed() -> None:
    started = Started(MpiError.LOST)
    comm = communicator(started)
    request = comm.Recv_init([], 1)
    request.Start()
    assert not request.Test()
    request.Wait()
    started.error = None
    assert not request.Test()
    request.Free()
    assert not started.freed
    assert request in comm.persistent


def test_one_that_has_not_failed_is_freed_unless_the_communicator_was_revoked() -> None:
    for revoked in (False, True):
        started = Started(None)
        request = communicator(started, revoked=revoked).Recv_init([], 1)
        request.Start()
        assert request.Test()
        request.Free()
        assert started.freed != revoked


def test_other_errors_of_a_persistent_request_are_raised() -> None:
    with pytest.raises(MpiError):
        communicator(Started(MpiError.OTHER)).Recv_init([], 1).Test()


@pytest.mark.parametrize("name", ["Ibcast", "Iallreduce"])
def test_a_collective_that_ends_after_a_loss_is_not_trusted(name: str) -> None:
    """Open MPI may say that it has ended well, and have left the memory as it was."""
    for revoked in (False, True):
        comm = communicator(Started(None), revoked=revoked)
        request = getattr(comm, name)([])
        assert request.Test() != revoked
        assert (request in comm.pending) == revoked


def test_a_message_that_has_come_is_there_whoever_is_lost_later() -> None:
    assert communicator(Started(None), revoked=True).Irecv([], 1).Test()


class Processes:
    """A communicator of two processes whose agreements end at the third look, with what the other one says."""

    rank, size = 0, 2

    def __init__(self, other: int, *, begins: bool = True, error: MpiError | None = None) -> None:
        self.other, self.begins, self.error = other, begins, error
        self.looks = 0
        self.revoked = False
        self.calls_outside = 0
        self.is_in_loop = False

    def Shrink(self) -> "Processes":
        """Nobody is lost."""
        return self

    def Set_errhandler(self, _: object) -> None: ...

    def Ack_failed(self) -> None: ...

    def allgather(self, value: object) -> list[Any]:
        """Only the name of this host."""
        return [value]

    def Iagree(self, flag: np.ndarray[Any, Any]) -> "Processes":
        self._called()
        if not self.begins:
            raise MpiError("internal error")
        self.flag = flag
        return self

    def Get_status(self, _: object = None) -> bool:
        self._called()
        self.looks += 1
        if self.looks < 3:
            return False
        self.flag[0] &= self.other
        if self.error is not None:
            raise self.error
        return True

    def _called(self) -> None:
        self.calls_outside += not self.is_in_loop

    def Idup(self) -> tuple["Processes", "Processes"]:
        """Another communicator, which is there at the third look."""
        copy = Processes(self.other)
        return copy, copy.Iagree(np.array([1]))

    def Test(self) -> bool:
        return True

    def Get_failed(self) -> SimpleNamespace:
        return SimpleNamespace(size=0)

    def Is_revoked(self) -> bool:
        return self.revoked

    def Revoke(self) -> None:
        self.revoked = True

    def perform(self, action: Callable[[], None]) -> None:
        """What a loop does."""
        self.is_in_loop = True
        action()
        self.is_in_loop = False


def job(processes: Processes) -> Job:
    return Job(MPI, processes, 0)


@pytest.mark.parametrize("other", [0, 1])
def test_all_have_to_say_yes(other: int) -> None:
    processes = Processes(other)
    assert job(processes).agree(True) == bool(other)
    assert job(Processes(1)).agree(False) is False


def test_mpi_is_called_by_the_loop_alone() -> None:
    """Open MPI puts a result aside without its bytes when another thread is in an agreement."""
    processes = Processes(1)
    assert job(processes).agree(True, processes.perform)
    assert processes.looks == 3
    assert processes.calls_outside == 0


def test_the_answer_holds_when_another_process_is_lost_meanwhile() -> None:
    for other in (0, 1):
        assert job(Processes(other, error=MpiError(MpiError.LOST))).agree(True) == bool(other)


def test_an_agreement_that_cannot_begin_is_an_error() -> None:
    with pytest.raises(MpiError, match="internal error"):
        job(Processes(1, begins=False)).agree(True)


@pytest.mark.parametrize("looks", [0, 2, 3])
def test_a_communicator_is_revoked_only_once_it_is_made(looks: int) -> None:
    """Open MPI crashes when it revokes one that a loss has left half made."""
    everybody = job(Processes(1))
    parent = everybody.adopt(Processes(1))
    copy, request = parent.Idup()
    for _ in range(looks):
        request.Test()
    everybody.revoke()
    assert parent.comm.revoked
    assert copy.comm.revoked == (looks == 3)


TOPIC = 900
RECEIVER, VICTIM, OTHER = range(3)


class Status:
    """Of the message that was found last."""

    source, nbytes = -1, 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, _: object) -> int:
        return self.nbytes


@dataclass
class Message:
    """One on its way."""

    source: int
    data: bytes
    is_whole: bool


class Network:
    """A communicator in which messages lie, of some only the beginning."""

    rank, size = RECEIVER, 3

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()

    def Improbe(self, tag: int, status: Status) -> Any:
        if not self.messages:
            return None
        message = self.messages.popleft()
        status.source, status.nbytes = message.source, len(message.data)

        def irecv(buffer: list[Any]) -> Any:
            buffer[0].data[:] = message.data
            return SimpleNamespace(Test=lambda: message.is_whole)

        return SimpleNamespace(Irecv=irecv)


class Ranks:
    """A channel of the receiver, and what the other two ranks of its node send to it."""

    def __init__(self) -> None:
        self.network = Network()
        self.counters = memoryview(bytearray(9 * 8)).cast("Q")
        sources: list[Callable[[bool], Wait]] = []
        loop: Any = SimpleNamespace(
            add_source=lambda progress, _: sources.append(progress), perform=lambda action: action()
        )
        mpi = SimpleNamespace(Status=Status, BYTE=None)
        bells: Any = dict.fromkeys(range(3))
        self.channel = Channel(mpi, self.network, loop, bells, self.counters, Traffic(), SimpleNamespace())  # type: ignore[arg-type]
        (self.progress,) = sources
        self.seen: list[int] = []
        self.texts: list[str] = []
        self.channel.listen(TOPIC, lambda source, text, _: (self.seen.append(source), self.texts.append(text)))  # type: ignore[func-returns-value]

    def send(
        self, source: int, *, is_whole: bool = True, leaves: bool = True, is_counted: bool = True, text: str = ""
    ) -> Message:
        """leaves: MPI has it. is_counted: the sender has added it to its messages for the receiver."""
        body = pickle.dumps(text)
        message = Message(source, HEADER.pack(TOPIC << 2, 0, len(body)) + body, is_whole)
        if leaves:
            self.network.messages.append(message)
        self.counters[source * 3 + RECEIVER] += is_counted
        return message

    def receive(self) -> list[int]:
        """The senders of the messages that arrive after the bell has rung once."""
        self.seen.clear()
        while self.progress(True) is Wait.AGAIN:
            pass
        return list(self.seen)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_half_a_message_does_not_hold_up_those_of_others(ranks: Ranks) -> None:
    """A rank that was cut off in the middle of one once hid the heartbeats of the third host, and this one ended."""
    ranks.send(VICTIM, is_whole=False)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]


def test_messages_of_a_rank_stay_in_order(ranks: Ranks) -> None:
    first, second = (ranks.send(VICTIM, is_whole=False, text=text) for text in ("first", "second"))
    ranks.send(VICTIM, text="third")
    second.is_whole = True
    assert ranks.receive() == []
    first.is_whole = True
    assert ranks.receive() == [VICTIM] * 3
    assert ranks.texts == ["first", "second", "third"]


def test_the_rest_of_what_a_lost_rank_has_begun_is_not_waited_for(ranks: Ranks) -> None:
    ranks.send(VICTIM, is_whole=False)
    assert ranks.receive() == []
    ranks.channel.lose(VICTIM)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]
    assert ranks.progress(False) is Wait.NOTIFY
    assert ranks.channel.quiet


def test_half_a_message_that_is_found_after_the_loss_does_not_either(ranks: Ranks) -> None:
    ranks.channel.lose(VICTIM)
    ranks.send(VICTIM, is_whole=False)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]


def test_a_message_that_its_sender_could_not_count_any_more_hides_none_of_the_others(ranks: Ranks) -> None:
    ranks.send(VICTIM, is_counted=False)
    ranks.send(OTHER)
    assert ranks.receive() == [VICTIM, OTHER]
    ranks.channel.lose(VICTIM)
    ranks.send(OTHER)
    assert ranks.receive() == [OTHER]


def test_a_message_that_was_counted_and_never_left_is_not_waited_for(ranks: Ranks) -> None:
    ranks.send(VICTIM, leaves=False)
    ranks.receive()
    assert not ranks.channel.quiet
    ranks.channel.lose(VICTIM)
    assert ranks.receive() == []
    assert ranks.channel.quiet
    assert ranks.progress(False) is Wait.NOTIFY
