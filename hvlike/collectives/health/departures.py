"""How a rank leaves the job, which ranks have left it or are lost, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from hvlike.errors import HorovodInternalError
from hvlike.transport.loop.coroutine import in_loop
from hvlike.transport.loop.loop import Loop

Errors = Mapping[int, HorovodInternalError]  # By rank: what operations that need it raise


class Ending(Enum):
    """How hvlike ends on a rank that has not failed; guard.py is about those that have.

                called by                            the other ranks             operations in flight
    SHUTDOWN    shutdown(), in the user's thread     this one waits for all      end in 5 s, or fail
    EXIT        the guard, as the program ends       this one waits for all      end in 5 s, or fail
    RESTART     elastic.run, in its thread           revoked communicators       fail at once
                                                     tell them

    Where a rank is lost under fault tolerance, or communicators were revoked, not all ranks will come: SHUTDOWN and
    EXIT go the way of RESTART then. Where the program has finalized MPI no rank can be reached, and the loop just ends.

    Each first calls what `Context.before_close` holds: sessions of RPC and groups of torch end. Each puts back what the
    guard has replaced, exit handlers too, once there is nobody to wait for.
    """

    SHUTDOWN = "shutdown"
    EXIT = "exit"
    RESTART = "restart"


class Departures:
    def __init__(self, loop: Loop) -> None:
        self.errors: dict[int, HorovodInternalError] = {}
        self.in_order: set[int] = set()  # Those that were not lost, but are done: they owe the others nothing
        self._loop = loop
        self._listeners: list[Callable[[Errors], None]] = []

    def listen(self, hear: Callable[[Errors], None]) -> None:
        """Have `hear` called in the loop for all ranks that leave, and for those that have left before."""
        self._loop.perform(lambda: self._listen(hear))

    def ignore(self, hear: Callable[[Errors], None]) -> None:
        """End what listen() began."""
        self._loop.perform(lambda: self._listeners.remove(hear))

    @in_loop
    def tell(self, errors: Errors, *, in_order: bool = False) -> None:
        """Some ranks have left in order, or are lost."""
        self.errors.update(errors)
        if in_order:
            self.in_order.update(errors)
        else:
            self.in_order.difference_update(errors)
        for hear in list(self._listeners):
            hear(errors)

    @in_loop
    def _listen(self, hear: Callable[[Errors], None]) -> None:
        self._listeners.append(hear)
        if self.errors:
            hear(dict(self.errors))
