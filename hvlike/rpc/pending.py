"""Calls in flight and their time limits."""

from __future__ import annotations

import heapq
import math
from itertools import count

from hvlike.rpc.message import Call

_SLACK = 1000


class PendingCalls:
    """The calls of one worker that have no answer yet, by number. In the loop, but for `add` and `take_all`."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._numbers = count(1)
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> int:
        """Number a call. From any thread."""
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def limit(self, number: int, deadline: float) -> None:
        """The call ends at `deadline`, in seconds of time.monotonic(), unless it is answered before."""
        heapq.heappush(self._deadlines, (deadline, number))
        if len(self._deadlines) > 2 * len(self._calls) + _SLACK:
            # Answered calls leave theirs behind: thousands a second, each for a minute.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._calls]
            heapq.heapify(self._deadlines)

    def take(self, number: int) -> Call | None:
        """The call `number`, which ends now; None if it has ended."""
        return self._calls.pop(number, None)

    def take_all(self, ranks: set[int] | None = None) -> list[Call]:
        """All calls, or those to `ranks`, which end now."""
        numbers = [number for number, call in list(self._calls.items()) if ranks is None or call.rank in ranks]
        ended = [self._calls.pop(number, None) for number in numbers]
        return [call for call in ended if call is not None]

    def take_expired(self, now: float) -> list[Call]:
        """The calls whose time is over at `now`, which end now."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            call = self._calls.pop(heapq.heappop(self._deadlines)[1], None)
            if call is not None:
                expired.append(call)
        return expired

    def next_deadline(self) -> float:
        """When the next call's time is over, as far as one has not ended; infinity when none is limited."""
        while self._deadlines and self._deadlines[0][1] not in self._calls:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def ranks(self) -> dict[int, int]:
        """How many calls wait for each worker."""
        waiting: dict[int, int] = {}
        for call in list(self._calls.values()):
            waiting[call.rank] = waiting.get(call.rank, 0) + 1
        return waiting
