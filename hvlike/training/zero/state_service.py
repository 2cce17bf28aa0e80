"""A rank asks the others for their share of the state, and they answer in their loops, whatever their programs do.

    asks     ("ask", key, number, version)             to each other rank, one after the other
    answers  ("answer", number, status, structure)     with the tensors, if its state is of that version

A state is of the same version on all ranks while one of them is between two steps: no other can make a further step
where gradients are reduced. Who has gone on nevertheless says so, and nothing is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import Tensor

from hvlike.collectives.context import Context
from hvlike.training.tensor_pickle import pack, unpack
from hvlike.training.zero.consolidation import States

TOPIC = 5

HERE = "has it"
BEHIND = "has not come so far"
AHEAD = "has gone on"
GONE = "no longer has the optimizer, or does not answer"

PATIENCE_SECONDS = 10.0
"""How long a rank that is behind may take to catch up: it still loads what this one has loaded."""
_ANSWER_SECONDS = 120.0
_PAUSE_SECONDS = 0.02

Key = tuple[int, str]
"""Number of the process set, and name of the optimizer in it."""

Snapshot = Callable[[int], tuple[str, States]]
"""How this rank's state stands to a version, and a copy of it in host memory where it is of that one. In the loop."""


class StateService:
    """Asks and answers for all optimizers of one rank."""

    def __init__(self, context: Context) -> None:
        self._channel = context.fabric.channel
        self._loop = context.fabric.loop
        self._snapshots: dict[Key, WeakMethod[Snapshot]] = {}
        self._number = 0
        self._answers: dict[int, tuple[str, States]] = {}
        self._lost: set[int] = set()
        context.when_lost.append(self._lost.update)
        self._channel.listen(TOPIC, self._hear)

    def offer(self, key: Key, snapshot: Snapshot) -> None:
        """Answer for an optimizer as long as it lives. Local; from any thread."""
        for each in [each for each, method in self._snapshots.items() if method() is None]:
            del self._snapshots[each]
        self._snapshots[key] = WeakMethod(snapshot)

    def fetch(self, rank: int, key: Key, version: int) -> tuple[str, States]:
        """Return how the state of `rank`, of the job, stands to this version, and its share where it has it.

        Blocks, but waits for no call of that rank's program.
        """
        waited = 0.0
        while True:
            status, states = self._ask(rank, key, version)
            if status != BEHIND or waited >= PATIENCE_SECONDS:
                return status, states
            self._loop.wait(lambda: False, _PAUSE_SECONDS)
            waited += _PAUSE_SECONDS

    def _ask(self, rank: int, key: Key, version: int) -> tuple[str, States]:
        self._number += 1
        number = self._number
        self._channel.send_soon(rank, TOPIC, ("ask", key, number, version))
        self._loop.wait(lambda: number in self._answers or rank in self._lost, _ANSWER_SECONDS)
        return self._answers.pop(number, (GONE, {}))

    def _hear(self, rank: int, letter: Any, tensors: list[Tensor]) -> None:
        what, *said = letter
        if what == "ask":
            key, number, version = said
            method = self._snapshots.get(key)
            snapshot = method() if method is not None else None
            status, states = (GONE, {}) if snapshot is None else snapshot(version)
            try:
                data, copies = pack(states, [])
            except Exception as error:  # __reduce__ of any class may raise anything
                status = f"has a state that cannot be pickled ({type(error).__name__}: {error})"
                data, copies = pack({}, [])
            self._channel.send(rank, TOPIC, ("answer", number, status, data), copies, kind="state")
        else:
            number, status, data = said
            self._answers[number] = status, unpack(data, [], tensors)


def state_service(context: Context) -> StateService:
    """Return that of the running hvlike, made at the first call. Local."""
    service = _services.get(context)
    if service is None:
        service = _services[context] = StateService(context)
    return service


_services: WeakKeyDictionary[Context, StateService] = WeakKeyDictionary()
