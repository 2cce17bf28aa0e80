"""How the state of all shares gets to one rank, in host memory: by a collective call, or asked for by one rank.

Collective: each rank in turn sends what it keeps, first the structure, pickled without its tensors, then the bytes of
all tensors as one stream, cut into parts. Beside the result there are never more than two parts in memory.

Asked for: other ranks answer in their loops, whatever their programs do.

    asks     ("ask", key, number, version)             to each other rank, one after the other
    answers  ("answer", number, status, structure)     with the tensors, if its state is of that version

A state is of the same version on all ranks while one of them is between two steps: no other can make a further step
where gradients are reduced. A rank that has gone on nevertheless answers so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor

from hvlike.collectives.api.alltoall import alltoall
from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import Context
from hvlike.training.state.tensor_pickle import TensorForm, pack, unpack
from hvlike.transport.messages.topics import Topic

PART_BYTES = 16 << 20

States = dict[int, Any]
"""The state of each parameter, by its index."""


class Consolidated(NamedTuple):
    """The state of all ranks."""

    version: int
    """How often it had changed then."""
    place: int
    """Position of the rank that has it."""
    states: States | None
    """None on the other ranks."""


def consolidate(own: States, to: int, rank: int, size: int, process_set: ProcessSet | None) -> States | None:
    """Return the states of all ranks on the rank `to`, as copies in host memory; None on the others.

    Collective over the set of `size` ranks, in which this one has the position `rank`; blocks.
    """

    def send(data: Tensor | None) -> Tensor:
        """Send bytes from the source, return those that have come to `to`. Collective; blocks."""
        part = torch.empty(0, dtype=torch.uint8, device="cpu") if data is None else data
        splits = [len(part) if place == to else 0 for place in range(size)]
        rows, _ = alltoall(part, splits, process_set=process_set)
        assert isinstance(rows, Tensor)
        return rows

    data, tensors = pack(own, [])
    head, _ = pack((data, [TensorForm.of(tensor) for tensor in tensors]), [])
    lengths = allgather(
        torch.tensor([[len(head), sum(tensor.nbytes for tensor in tensors)]], device="cpu"), process_set=process_set
    ).tolist()
    result: States = {}
    for source in range(size):
        if source == to:
            if rank == to:
                result.update(copy_states(own))
            continue
        head_bytes, stream_bytes = lengths[source]
        received = send(torch.frombuffer(bytearray(head), dtype=torch.uint8) if rank == source else None)
        assert rank != to or len(received) == head_bytes
        parts = -(-stream_bytes // PART_BYTES)
        if rank == source:
            for part in cut(map(_flat, tensors), PART_BYTES):
                send(part)
        elif rank == to:
            structure, forms = unpack(bytes(received.numpy()), [], [])
            arrived = [torch.empty(form.shape, dtype=form.dtype, device="cpu") for form in forms]
            fill([each.view(-1).view(torch.uint8) for each in arrived], (send(None) for _ in range(parts)))
            result.update(unpack(structure, [], arrived))
        else:
            for _ in range(parts):
                send(None)
    return result if rank == to else None


def copy_states(states: States) -> States:
    """Return a copy, in host memory."""
    data, tensors = pack(states, [])
    copies = [_flat(tensor).clone().view(tensor.dtype).view(tensor.shape) for tensor in tensors]
    copied: States = unpack(data, [], copies)
    return copied


def cut(flats: Iterator[Tensor], most: int) -> Iterator[Tensor]:
    """Yield the bytes of flat tensors, one after the other, in parts of `most`; the last may be shorter."""
    held: list[Tensor] = []
    room = most
    for flat in flats:
        start = 0
        while start < len(flat):
            part = flat[start : start + room]
            held.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield torch.cat(held)
                held, room = [], most
    if held:
        yield torch.cat(held)


def fill(flats: Sequence[Tensor], parts: Iterator[Tensor]) -> None:
    """Put the bytes of the parts into flat tensors, one after the other; the reverse of `cut`."""
    part = torch.empty(0, dtype=torch.uint8, device="cpu")
    for flat in flats:
        start = 0
        while start < len(flat):
            if not len(part):
                part = next(parts)
            taken = min(len(part), len(flat) - start)
            flat[start : start + taken] = part[:taken]
            part = part[taken:]
            start += taken


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, row by row, in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


HERE = "has it"
BEHIND = "has not come so far"
AHEAD = "has gone on"
GONE = "no longer has the optimizer, or does not answer"

PATIENCE_SECONDS = 10.0
"""How long a rank that is behind may take to catch up: it may still be loading a state."""
_ANSWER_SECONDS = 120.0
_PAUSE_SECONDS = 0.02

Key = tuple[int, str]
"""Number of the process set, and name of the optimizer in it."""

Snapshot = Callable[[int], tuple[str, States]]
"""Compares this rank's state with a version; also returns a copy in host memory if it has that one. In the loop."""


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
        self._channel.listen(Topic.ZERO_STATE, self._on_message)

    def offer(self, key: Key, snapshot: Snapshot) -> None:
        """Answer for an optimizer as long as it lives. Local; from any thread."""
        for each in [each for each, method in self._snapshots.items() if method() is None]:
            del self._snapshots[each]
        self._snapshots[key] = WeakMethod(snapshot)

    def fetch(self, rank: int, key: Key, version: int) -> tuple[str, States]:
        """Ask a rank of the job whether it has this version, and for its share if so.

        Blocks, but needs no call on that rank.
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
        self._channel.send_soon(rank, Topic.ZERO_STATE, ("ask", key, number, version))
        self._loop.wait(lambda: number in self._answers or rank in self._lost, _ANSWER_SECONDS)
        return self._answers.pop(number, (GONE, {}))

    def _on_message(self, rank: int, message: Any, tensors: list[Tensor]) -> None:
        what, *rest = message
        if what == "ask":
            key, number, version = rest
            method = self._snapshots.get(key)
            snapshot = method() if method is not None else None
            status, states = (GONE, {}) if snapshot is None else snapshot(version)
            try:
                data, copies = pack(states, [])
            except Exception as error:  # __reduce__ of any class may raise anything
                status = f"has a state that cannot be pickled ({type(error).__name__}: {error})"
                data, copies = pack({}, [])
            self._channel.send(rank, Topic.ZERO_STATE, ("answer", number, status, data), copies, kind="state")
        else:
            number, status, data = rest
            self._answers[number] = status, unpack(data, [], tensors)


def state_service(context: Context) -> StateService:
    """Return the service of the running hvlike, made at the first call. Local."""
    service = _services.get(context)
    if service is None:
        service = _services[context] = StateService(context)
    return service


_services: WeakKeyDictionary[Context, StateService] = WeakKeyDictionary()
