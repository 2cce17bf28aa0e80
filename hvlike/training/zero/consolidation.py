"""The state of all shares brought to one rank, in host memory, one rank after the other.

Each rank in turn sends what it keeps: first the structure, pickled without its tensors, then the bytes of all tensors
as one stream, cut into parts. Beside the result there are never more than two parts in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvlike.collectives.allgather import allgather
from hvlike.collectives.alltoall import alltoall
from hvlike.collectives.process_set import ProcessSet
from hvlike.training.tensor_pickle import TensorForm, pack, unpack

PART_BYTES = 16 << 20

States = dict[int, Any]
"""What the optimizer keeps for each parameter, by its place."""


class Consolidated(NamedTuple):
    """The state of all ranks."""

    version: int
    """How often it had changed then."""
    place: int
    """Of the rank that has it, in the process set."""
    states: States | None
    """None on the other ranks."""


def consolidate(own: States, to: int, rank: int, size: int, process_set: ProcessSet | None) -> States | None:
    """Return the states of all ranks on the rank `to` of the set, as copies in host memory; None on the others.

    Collective over the set of `size` ranks, of which this is number `rank`; blocks.
    """
    data, tensors = pack(own, [])
    head, _ = pack((data, [TensorForm.of(tensor) for tensor in tensors]), [])
    lengths = allgather(
        torch.tensor([[len(head), sum(map(_nbytes, tensors))]], device="cpu"), process_set=process_set
    ).tolist()
    result: States = {}
    for source in range(size):
        if source == to:
            if rank == to:
                result.update(copy_states(own))
            continue
        post = _Post(source, to, rank, size, process_set)
        head_bytes, stream_bytes = lengths[source]
        received = post.send(torch.frombuffer(bytearray(head), dtype=torch.uint8) if rank == source else None)
        assert rank != to or len(received) == head_bytes
        parts = -(-stream_bytes // PART_BYTES)
        if rank == source:
            for part in cut(map(_flat, tensors), PART_BYTES):
                post.send(part)
        elif rank == to:
            structure, forms = unpack(bytes(received.numpy()), [], [])
            arrived = [torch.empty(form.shape, dtype=form.dtype, device="cpu") for form in forms]
            fill([each.view(-1).view(torch.uint8) for each in arrived], (post.send(None) for _ in range(parts)))
            result.update(unpack(structure, [], arrived))
        else:
            for _ in range(parts):
                post.send(None)
    return result if rank == to else None


def copy_states(states: States) -> States:
    """Return a copy, in host memory."""
    data, tensors = pack(states, [])
    copies = [_flat(tensor).clone().view(tensor.dtype).view(tensor.shape) for tensor in tensors]
    copied: States = unpack(data, [], copies)
    return copied


class _Post:
    """Sends bytes from one rank of a set to another; the others only take part."""

    def __init__(self, source: int, to: int, rank: int, size: int, process_set: ProcessSet | None) -> None:
        self._splits = [0] * size
        self._is_source = rank == source
        self._to = to
        self._process_set = process_set

    def send(self, data: Tensor | None) -> Tensor:
        """Send `data`, on the source; return what came, on the receiver. Collective; blocks."""
        if data is None:
            data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._splits[self._to] = len(data)
        rows, _ = alltoall(data, self._splits, process_set=self._process_set)
        assert isinstance(rows, Tensor)
        return rows


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


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, row by row, in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
