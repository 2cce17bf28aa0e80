"""The table behind a store: keys, values and queues, and the calls that wait for keys. Pure: no MPI, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    ok: bool
    value: Any  # If not ok: why


Caller = tuple[int, int]
"""A rank, and the number of its call."""

Due = list[tuple[Caller, Answer]]
"""Who is to be told what."""

_WAITING_CALLS = ("get", "wait", "multi_get", "queue_pop")
_LOST = "{lost} and nobody has set {keys}"


class Table:
    """Calls are done one after the other, in the order in which they come; a call that waits is done once it can be."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, dict[Caller, tuple[str, tuple[Any, ...]]]] = {}  # By the first key that is missing
        self._lost = ""

    def call(self, caller: Caller, what: str, *arguments: Any) -> Due:
        """Return what is due now: the answer to this call unless it waits, and to those that have waited for it."""
        missing = self._missing(what, arguments)
        if missing:
            if self._lost:
                return [(caller, self._never(missing))]
            self._waiting.setdefault(missing[0], {})[caller] = (what, arguments)
            return []
        due: Due = [(caller, getattr(self, f"_{what}")(*arguments))]
        for key in _written(what, arguments):
            for other, (its, given) in self._waiting.pop(key, {}).items():
                due += self.call(other, its, *given)
        return due

    def cancel(self, caller: Caller) -> list[str]:
        """Forget a call that waits. Returns the keys that it has waited for in vain; empty: it does not wait."""
        for callers in self._waiting.values():
            if caller in callers:
                what, arguments = callers.pop(caller)
                return self._missing(what, arguments)
        return []

    def lose(self, lost: str) -> Due:
        """From now on no call waits: some of those that might set a key have gone. lost: who, for the error."""
        self._lost = lost
        waiting, self._waiting = self._waiting, {}
        return [
            (caller, self._never(self._missing(what, arguments)))
            for callers in waiting.values()
            for caller, (what, arguments) in callers.items()
        ]

    def _never(self, missing: Sequence[str]) -> Answer:
        return Answer(False, _LOST.format(lost=self._lost, keys=", ".join(missing)))

    def _missing(self, what: str, arguments: tuple[Any, ...]) -> list[str]:
        """The keys that this call has to wait for."""
        if what not in _WAITING_CALLS:
            return []
        if what == "queue_pop":
            key, block = arguments
            return [key] if block and key not in self._queues else []
        keys = [arguments[0]] if what == "get" else arguments[0]
        return [key for key in keys if key not in self._values and (what != "wait" or key not in self._queues)]

    # -- the calls, as torch.distributed.Store has them ---------------------------------------------

    def _set(self, key: str, value: bytes) -> Answer:
        self._values[key] = value
        return Answer(True, None)

    def _get(self, key: str) -> Answer:
        return Answer(True, self._values[key])

    def _wait(self, keys: Sequence[str]) -> Answer:
        return Answer(True, None)

    def _add(self, key: str, amount: int) -> Answer:
        present = self._values.get(key, b"0")
        try:
            total = int(present) + amount
        except ValueError:
            return Answer(False, f"add({key!r}, {amount}): the value of this key is not a number but {present[:40]!r}")
        self._values[key] = str(total).encode()
        return Answer(True, total)

    def _check(self, keys: Sequence[str]) -> Answer:
        return Answer(True, all(key in self._values or key in self._queues for key in keys))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> Answer:
        """As TCPStore: an empty `expected` sets a key that is missing; else what is there, or `expected`, is told."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return Answer(True, self._values.get(key, expected))

    def _delete_key(self, key: str) -> Answer:
        there = [keys.pop(key) for keys in (self._values, self._queues) if key in keys]
        return Answer(True, bool(there))

    def _append(self, key: str, value: bytes) -> Answer:
        return self._set(key, self._values.get(key, b"") + value)

    def _multi_get(self, keys: Sequence[str]) -> Answer:
        return Answer(True, [self._values[key] for key in keys])

    def _multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> Answer:
        self._values.update(zip(keys, values, strict=True))
        return Answer(True, None)

    def _num_keys(self) -> Answer:
        return Answer(True, len(self._values) + len(self._queues))

    def _list_keys(self) -> Answer:
        return Answer(True, [*self._values, *self._queues])

    def _queue_push(self, key: str, value: bytes) -> Answer:
        self._queues.setdefault(key, deque()).append(value)
        return Answer(True, None)

    def _queue_pop(self, key: str, block: bool) -> Answer:
        """None: the queue is empty and the caller does not want to wait."""
        queue = self._queues.get(key)
        if queue is None:
            return Answer(True, None)
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return Answer(True, value)

    def _queue_len(self, key: str) -> Answer:
        return Answer(True, len(self._queues.get(key, ())))


def _written(what: str, arguments: tuple[Any, ...]) -> Sequence[str]:
    """The keys that may be there only since this call."""
    if what in ("set", "add", "append", "compare_set", "queue_push"):
        return arguments[:1]
    keys: Sequence[str] = arguments[0] if what == "multi_set" else ()
    return keys
