"""Classes and functions that tests of RRefs have run on other workers."""

import time
from typing import Any, ClassVar

import torch
from support.rpc.doors import pass_door

import hvlike.rpc
from hvlike.rpc.functions import async_execution
from hvlike.rpc.rrefs.rref import RRef
from hvlike.rpc.rrefs.session import live_rrefs


class Private(Exception):
    """An exception that RPC alone would turn into a RuntimeError."""


class Counter:
    """A value with methods."""

    limit = 7

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, step: int = 1) -> int:
        """Count on, and return where it stands."""
        self.count += step
        return self.count

    def read(self) -> int:
        """Where it stands."""
        return self.count

    def fail(self) -> None:
        raise Private("on purpose")

    def wait(self, door: str) -> str:
        """Return when the door is open."""
        pass_door(door)
        return door


class Tracked:
    """A value that says when it is freed."""

    freed: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        Tracked.freed.append(self.name)


def raise_private() -> None:
    raise Private("line one\nline two")


def wait_until_freed(name: str) -> bool:
    """Whether the tracked value of that name on this worker is gone in a few seconds."""
    deadline = time.monotonic() + 20
    while name not in Tracked.freed and time.monotonic() < deadline:
        time.sleep(0.001)
    return name in Tracked.freed


def is_freed(name: str) -> bool:
    return name in Tracked.freed


def fetch(rref: RRef[Any]) -> Any:
    """Copy the value, or take it where this is its owner."""
    return rref.to_here()


def fetch_all(found: list[RRef[Any]]) -> list[Any]:
    return [rref.to_here() for rref in found]


def give_back(value: Any) -> Any:
    return value


def describe(rref: RRef[Any]) -> tuple[bool, bool]:
    """What this worker sees of an RRef before it touches it."""
    return rref.confirmed_by_owner(), rref.is_owner()


def make_local(value: Any) -> RRef[Any]:
    return RRef(value)


def make_on(to: int, value: Any) -> RRef[Any]:
    """An RRef that this worker has a third one make."""
    return hvlike.rpc.remote(to, give_back, (value,))


def forward(ranks: list[int], rref: RRef[Any]) -> Any:
    """Pass an RRef along; the last of the ranks fetches it."""
    if not ranks:
        return rref.to_here()
    return hvlike.rpc.rpc_sync(ranks[0], forward, (ranks[1:], rref))


@async_execution
def forward_later(ranks: list[int], rref: RRef[Any]) -> Any:
    """The same without a thread that waits: any number of rings at a time."""
    if ranks:
        return hvlike.rpc.rpc_async(ranks[0], forward_later, (ranks[1:], rref))
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(rref.to_here())
    return future


KEPT: dict[str, Any] = {}


def keep(name: str, value: Any) -> None:
    KEPT[name] = value


def kept(name: str) -> Any:
    return KEPT[name]


def is_kept(name: str) -> bool:
    return name in KEPT


def let_go(name: str) -> None:
    del KEPT[name]


def is_same(rref: RRef[Any], name: str) -> bool:
    """Whether the value of an RRef that has come to its owner is the object kept there."""
    return rref.local_value() is KEPT[name]


def fill(rref: RRef[torch.Tensor], number: float) -> None:
    """Change the value in place, on its owner."""
    rref.local_value().fill_(number)


def live() -> list[str]:
    """The values in the table of this worker."""
    return [str(each) for each in live_rrefs()]
