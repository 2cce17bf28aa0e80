"""How often a thread checks for an event before it sleeps, and what wakes it from a sleep on sockets. No MPI."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop import spin
from hvlike.transport.loop.socket_events import SocketEvents
from hvlike.transport.loop.spin import Spin, SpinPolicy
from hvlike.transport.memory.doorbell import BELL_BYTES, ON_SOCKETS, Doorbell, Fence

CHECKS = 10
MOMENT = 1e-6


def begun(*, serves: bool, crowded: bool, unnotified: bool, checks: int = CHECKS) -> Spin:
    """A wait that begins at time 0."""
    made = Spin(SpinPolicy(crowded=crowded))
    made.begin(0.0, checks, serves=serves, unnotified=unnotified)
    return made


def checks_of(wait: Spin, *, seconds_each: float = MOMENT, unnotified: bool = False, most: int = 100_000) -> int:
    """How many checks a wait makes, each of them so long."""
    now = 0.0
    for count in range(most):
        now += seconds_each
        if not wait.goes_on(now, unnotified=unnotified):
            return count
    return most


SLOW = 2 * spin.INTERRUPTION_SECONDS
UNNOTIFIED = pytest.approx(spin.UNNOTIFIED_SECONDS / SLOW, abs=1.5)


@pytest.mark.parametrize(
    ("serves", "crowded", "unnotified", "seconds_each", "expected"),
    [
        pytest.param(False, False, False, MOMENT, CHECKS, id="a few"),
        pytest.param(False, False, False, spin.UNSHARED_SECONDS, pytest.approx(1, abs=1), id="slow ones end by time"),
        pytest.param(True, False, False, MOMENT, pytest.approx(spin.RPC_SECONDS / MOMENT, rel=0.01), id="RPC by time"),
        pytest.param(True, False, False, SLOW, 0, id="none after an interruption: others want the interpreter or core"),
        # They may take any time: the other rank runs in between.
        pytest.param(False, True, False, 1.0, CHECKS, id="without a core of its own, counted"),
        pytest.param(True, True, False, 1.0, CHECKS * spin.RPC_CHECKS_FACTOR, id="the same with RPC"),
        pytest.param(True, True, True, SLOW, UNNOTIFIED, id="without a doorbell through interruptions"),
        pytest.param(True, False, True, SLOW, UNNOTIFIED, id="the same with a core of its own"),
    ],
)
def test_how_many_checks_a_wait_makes(
    serves: bool, crowded: bool, unnotified: bool, seconds_each: float, expected: object
) -> None:
    wait = begun(serves=serves, crowded=crowded, unnotified=unnotified)
    assert checks_of(wait, seconds_each=seconds_each, unnotified=unnotified) == expected
    none = begun(serves=serves, crowded=crowded, unnotified=False, checks=0)
    assert checks_of(none) == 0, "a thread that is not to check sleeps at once"


def test_a_crowded_rank_checks_counters_once_and_the_board_never() -> None:
    crowded, alone = SpinPolicy(crowded=True), SpinPolicy(crowded=False)
    assert (crowded.counter_checks, crowded.board_checks) == (1, 0)
    assert (alone.counter_checks, alone.board_checks) == (spin.COUNTER_CHECKS, spin.BOARD_CHECKS)


def test_only_a_crowded_rank_that_sockets_wake_sleeps_at_once_for_another_node() -> None:
    crowded, alone = SpinPolicy(crowded=True), SpinPolicy(crowded=False)
    assert crowded.network_seconds == spin.UNNOTIFIED_SECONDS
    for policy in (crowded, alone):
        policy.hear_sockets(True)
    assert (crowded.network_seconds, alone.network_seconds) == (0.0, spin.UNNOTIFIED_SECONDS)
    wait = Spin(crowded)
    wait.begin(0.0, CHECKS, serves=False, unnotified=True)
    assert checks_of(wait, unnotified=True) == 0


def held_up(policy: SpinPolicy, *, seconds_each: float, checks: int, now: float = 0.0) -> None:
    wait = Spin(policy)
    wait.begin(now, CHECKS, serves=False, unnotified=True)
    for _ in range(checks):
        now += seconds_each
        wait.goes_on(now, unnotified=True)


def test_a_rank_whose_checks_are_held_up_is_crowded_for_a_while() -> None:
    """Another container, or any program, wants its core: no count of ranks tells it."""
    policy = SpinPolicy(crowded=False)
    held_up(policy, seconds_each=3e-3, checks=3)
    assert policy.crowded
    assert (policy.counter_checks, policy.queue_seconds) == (1, spin.CROWDED_QUEUE_SECONDS)
    held_up(policy, seconds_each=MOMENT, checks=10, now=1.0)
    assert policy.crowded
    held_up(policy, seconds_each=MOMENT, checks=10, now=2.0)
    assert not policy.crowded
    assert policy.counter_checks == spin.COUNTER_CHECKS


def test_the_wait_in_which_a_rank_finds_itself_held_up_goes_on_without_a_doorbell() -> None:
    """It gives its core away between checks; a rank that sleeps hears of a message of another node late."""
    policy = SpinPolicy(crowded=False)
    wait = Spin(policy)
    wait.begin(0.0, CHECKS, serves=False, unnotified=True)
    assert checks_of(wait, seconds_each=3e-3, unnotified=True) == pytest.approx(spin.UNNOTIFIED_SECONDS / 3e-3, abs=1.5)
    assert policy.crowded


def test_a_single_interruption_makes_no_rank_crowded() -> None:
    policy = SpinPolicy(crowded=False)
    for second in range(5):
        held_up(policy, seconds_each=3e-3, checks=1, now=second)
    assert not policy.crowded


def test_a_rank_without_a_core_of_its_own_stays_crowded() -> None:
    policy = SpinPolicy(crowded=True)
    held_up(policy, seconds_each=3e-3, checks=10)
    held_up(policy, seconds_each=MOMENT, checks=10, now=10.0)
    assert policy.crowded


def test_a_sleep_is_no_check_that_was_held_up() -> None:
    policy = SpinPolicy(crowded=False)
    checks = Spin(policy)
    checks.begin(0.0, 100, serves=False, unnotified=True)
    for number in range(1, 20):
        checks.slept()
        checks.goes_on(number * 0.25, unnotified=True)
    assert not policy.crowded


LONG = 20.0  # Seconds that no test waits for


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


@pytest.fixture
def events(connection: tuple[socket.socket, socket.socket]) -> Iterator[SocketEvents]:
    """For these tests the near end of the connection leads to another host."""
    near, _ = connection
    made = SocketEvents(lambda file: file == near.fileno())
    made.scan()
    yield made
    made.close()


def slept(events: SocketEvents, seconds: float) -> float:
    began = time.monotonic()
    events.sleep(seconds)
    return time.monotonic() - began


def test_bytes_that_arrive_wake_once_however_many_are_left_unread(
    connection: tuple[socket.socket, socket.socket], events: SocketEvents
) -> None:
    connection[1].sendall(bytes(100))
    assert slept(events, LONG) < LONG / 2
    assert slept(events, 0.02) > 0.01
    # They are there for MPI.
    assert len(connection[0].recv(1000)) == 100
    connection[1].sendall(b"more")
    assert slept(events, LONG) < LONG / 2


def test_room_to_write_wakes(connection: tuple[socket.socket, socket.socket], events: SocketEvents) -> None:
    near, far = connection
    near.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += near.send(bytes(1 << 16))
    events.sleep(0.01)

    def read() -> None:
        left = sent
        while left:
            left -= len(far.recv(1 << 20))

    reader = threading.Thread(target=read)
    reader.start()
    assert slept(events, LONG) < LONG / 2
    reader.join()


def test_a_connection_that_comes_later_is_found(events: SocketEvents) -> None:
    later = SocketEvents(lambda file: True)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        far, _ = server.accept()
        with far:
            later.sleep(0.001)
            far.sendall(b"x")
            assert slept(later, LONG) < LONG / 2
    later.close()


def test_messages_are_carried_where_sockets_have_told_of_them(
    connection: tuple[socket.socket, socket.socket], events: SocketEvents
) -> None:
    events.check_carry()
    assert not events.carry
    connection[1].sendall(b"x")
    connection[0].recv(1)  # As MPI would, before anybody asks
    events.check_carry()
    assert events.carry


def test_loopback_connections_and_other_files_are_no_other_host(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    strict = SocketEvents()
    read, write = os.pipe()
    strict.scan()
    connection[1].sendall(b"x")
    os.write(write, b"x")
    strict.check_carry()
    assert not strict.carry
    assert connection[0].recv(1) == b"x"  # Nothing was taken or closed
    os.close(read)
    os.close(write)
    strict.close()


def test_files_of_others_stay_as_they_are(connection: tuple[socket.socket, socket.socket]) -> None:
    """A default timeout makes Python's sockets non-blocking, those that wrap a file of somebody else, too."""
    socket.setdefaulttimeout(5.0)
    try:
        strict = SocketEvents()
        strict.scan()
        assert os.get_blocking(connection[0].fileno())
        strict.close()
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize("wake", [Doorbell.ring, Doorbell.notify_if_sleeping], ids=["ring", "notify"])
def test_a_rank_of_the_same_host_wakes_by_the_doorbell(events: SocketEvents, wake: object) -> None:
    bell = Doorbell(Segment.private(BELL_BYTES), 0, Fence(), events.send)
    bell.initialise(os.getpid(), events.token)
    bell.enter()
    bell.prepare_sleep(ON_SOCKETS)
    assert callable(wake)
    for _ in range(50):
        wake(bell)  # More often than a socket keeps
    assert slept(events, LONG) < LONG / 2
    assert bell.rung()
    bell.awake()
    # All were for that sleep.
    assert slept(events, 0.02) > 0.01


@pytest.mark.parametrize(("congestion", "paced"), [("reno", False), ("bbr", True)])
def test_it_is_known_whether_tcp_spaces_its_packets_out(
    connection: tuple[socket.socket, socket.socket], congestion: str, paced: bool
) -> None:
    near, _ = connection
    try:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        pytest.skip(f"the system has no {congestion}: {error}")
    events = SocketEvents(lambda file: file == near.fileno())
    events.scan()
    assert events.paced == paced
    events.close()
