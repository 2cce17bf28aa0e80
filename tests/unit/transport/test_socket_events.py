"""Sleeping on sockets: what wakes a rank, what does not, and which connections count. One process, no MPI."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hvlike.system.mapped_memory import Segment
from hvlike.transport.loop.socket_events import SocketEvents
from hvlike.transport.memory.doorbell import BELL_BYTES, ON_SOCKETS, Doorbell, Fence

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
