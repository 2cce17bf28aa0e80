"""Which ranks have left the job, or are lost, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvlike.errors import HorovodInternalError
from hvlike.transport.loop.loop import Loop

Errors = Mapping[int, HorovodInternalError]  # By rank: what operations that need it raise


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

    def tell(self, errors: Errors, *, in_order: bool = False) -> None:
        """Some ranks have left in order, or are lost; in the loop."""
        self.errors.update(errors)
        if in_order:
            self.in_order.update(errors)
        else:
            self.in_order.difference_update(errors)
        for hear in list(self._listeners):
            hear(errors)

    def _listen(self, hear: Callable[[Errors], None]) -> None:
        self._listeners.append(hear)
        if self.errors:
            hear(dict(self.errors))
