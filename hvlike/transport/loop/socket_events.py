"""Sleeping until a message of another node comes: MPI has no call for that, but over TCP its sockets tell.

A rank that polls MPI takes the core from the rank it waits for, where they share one; a rank that sleeps between polls
sees each message late. So it sleeps on the sockets of its own process instead: those that MPI has opened are among
them. Nothing is read from them. Edge-triggered events (epoll(7)) say that bytes have come since the last sleep, or that
there is room to write again, however much MPI has left there.

    MPI's sockets      another node sends, or takes what was sent
    a datagram socket  a rank of this node rings (memory/doorbell.py)

Whether MPI's messages go over sockets at all is seen when the network is measured: `carry` is true where they were
heard of meanwhile. Over InfiniBand, and before that, ranks poll.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import secrets
import select
import socket
import sys
from collections.abc import Callable

from hvlike.system.system import system

RESCAN_SECONDS = 0.1  # MPI connects to a peer with the first message
# Where struct sockaddr_in and sockaddr_in6 have the address, by family.
_ADDRESSES = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
_libc = ctypes.PyDLL(None)  # Calls that return at once
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET


def _leads_to_another_host(file: int) -> bool:
    """Whether this is a connection of TCP that is no loopback."""
    # Not by socket.socket(fileno=...): after socket.setdefaulttimeout() that makes the file non-blocking for its owner.
    kind, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    size = ctypes.c_uint(ctypes.sizeof(kind))
    if _libc.getsockopt(file, socket.SOL_SOCKET, socket.SO_TYPE, ctypes.byref(kind), ctypes.byref(size)):
        return False  # No socket
    size = ctypes.c_uint(len(name))
    if kind.value != socket.SOCK_STREAM or _libc.getpeername(file, name, ctypes.byref(size)):
        return False  # Of another kind, or not connected
    where = _ADDRESSES.get(int.from_bytes(name.raw[:2], sys.byteorder))
    if where is None:
        return False
    address = ipaddress.ip_address(name.raw[where])
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_paced(file: int) -> bool:
    name = ctypes.create_string_buffer(16)
    size = ctypes.c_uint(len(name))
    _libc.getsockopt(file, socket.IPPROTO_TCP, socket.TCP_CONGESTION, name, ctypes.byref(size))
    return name.value.startswith(b"bbr")


def _address(token: int) -> bytes:
    """In the abstract namespace of unix(7): it ends with its process."""
    return b"\0hvlike-%x" % token


class SocketEvents:
    """The events of this process's connections to other hosts, and of one socket for the ranks of this one."""

    def __init__(self, counts: Callable[[int], bool] = _leads_to_another_host) -> None:
        """counts: whether a file that has events is a connection to another host."""
        self.carry = False
        """Whether MPI's messages come over these sockets."""
        self.paced = False
        """Whether TCP spaces the packets of any of them out."""
        self._counts = counts
        self.token = secrets.randbits(62)
        """By this the ranks of this host wake this one."""
        self._epoll = select.epoll()
        self._rings = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._rings.bind(_address(self.token))
        self._epoll.register(self._rings.fileno(), select.EPOLLIN | select.EPOLLET)
        self._next_scan = 0.0

    def scan(self) -> None:
        """Find the connections that there are now, and forget what they have told so far."""
        for name in os.listdir("/proc/self/fd"):
            # Registered already, no file that has events, or closed since: each says so by an OSError.
            with contextlib.suppress(OSError):
                self._epoll.register(int(name), _EVENTS)
                if self._counts(int(name)):
                    self.paced = self.paced or _is_paced(int(name))
                else:
                    self._epoll.unregister(int(name))
        self._epoll.poll(0)
        self._next_scan = system.monotonic() + RESCAN_SECONDS

    def check_carry(self) -> None:
        """Messages of other nodes have come since `scan`: see whether sockets have told of them."""
        # Which event it was is not told: MPI has read the bytes.
        self.carry = any(file != self._rings.fileno() for file, _ in self._epoll.poll(0))

    def sleep(self, seconds: float) -> bool:
        """Sleep until a socket tells of something, or a rank of this host rings; at most so many seconds. True: it is
        worth a look, even after a sleep to the end, as a connection may be new.
        """
        events = self._epoll.poll(seconds)
        if not events and system.monotonic() > self._next_scan:
            self.scan()
        if any(file == self._rings.fileno() for file, _ in events):
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._rings.recv(1)
        return True

    def send(self, token: int) -> None:
        """Wake the rank of this host that has this token, if it sleeps. Any thread."""
        # Full: it wakes anyway. Not found, as from another network namespace: it looks again after a millisecond.
        with contextlib.suppress(OSError):
            self._rings.sendto(b"r", _address(token))

    def close(self) -> None:
        self._epoll.close()
        self._rings.close()
