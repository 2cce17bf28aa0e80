"""broadcast_object and allgather_object: Python objects, pickled, as tensors of bytes."""

from __future__ import annotations

import pickle
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvlike.collectives.api.broadcast import broadcast_
from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.session.basics import rank
from hvlike.errors import HorovodInternalError, UsageError
from hvlike.observe.looking import only_looks

if TYPE_CHECKING:
    from hvlike.collectives.requests.process_set import ProcessSet


_GOOD, _FAILED = 0, 1


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the root's object on every rank.

    Collective: every rank of the set calls it. Blocks until done.

    Args:
        obj: On the root: anything that pickles. Ignored elsewhere, so the ranks may pass different types. A DTensor in
            it arrives with the root's part, as in torch's own collectives of objects.
        root_rank: The rank whose object it is: its rank in the job.
        name: Matches calls between ranks. Default: calls are matched by their order.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        On the root `obj` itself, elsewhere a copy.

    Raises:
        UsageError: On the root, if the object does not pickle.
        HorovodInternalError: Then on all other ranks; also PeerLeftError and ShutdownError, as `broadcast`.

    Example:
        >>> settings = hvd.broadcast_object(settings if hvd.rank() == 0 else None)

    Source: horovod.torch.broadcast_object.
    """
    is_root = rank() == root_rank
    status, payload = _packed(obj) if is_root else (_GOOD, torch.empty(0, dtype=torch.uint8, device="cpu"))
    header = torch.tensor([status, payload.numel()], dtype=torch.int64, device="cpu")
    broadcast_(header, root_rank, name=_part(name, "size"), process_set=process_set)
    if not is_root:
        payload = torch.empty(int(header[1]), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, name=_part(name, "bytes"), process_set=process_set)
    if int(header[0]) == _FAILED:
        _raise_unpicklable("broadcast_object", payload, root_rank, is_root)
    return obj if is_root else _unpacked(payload)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return the objects of all ranks.

    Collective: every rank of the set calls it. Blocks until done.

    Args:
        obj: Anything that pickles. A DTensor in it arrives with the part of the rank that has sent it.
        name: Matches calls between ranks. Default: calls are matched by their order.
        process_set: The ranks to run among. Default: all ranks.

    Returns:
        A list with one object for each rank of the set, in rank order; all of them are copies.

    Raises:
        UsageError: On a rank whose object does not pickle.
        HorovodInternalError: Then on all other ranks; also PeerLeftError and ShutdownError, as `allgather`.

    Source: horovod.torch.allgather_object.
    """
    status, payload = _packed(obj)
    header = torch.tensor([[rank(), status, payload.numel()]], dtype=torch.int64, device="cpu")
    headers = allgather(header, name=_part(name, "size"), process_set=process_set)
    payloads = allgather(payload, name=_part(name, "bytes"), process_set=process_set)
    parts = torch.split(payloads, [int(size) for size in headers[:, 2]])
    for (source, state, _), part in zip(headers.tolist(), parts, strict=True):
        if state == _FAILED:
            _raise_unpicklable("allgather_object", part, source, source == rank())
    return [_unpacked(part) for part in parts]


def _part(name: str | None, suffix: str) -> str | None:
    """Name one of the two messages of an object, from the caller's name only: the object's type may differ by rank."""
    return None if name is None else f"{name} ({suffix})"


def _packed(obj: Any) -> tuple[int, Tensor]:
    """Return (_GOOD, the pickled bytes of obj) or (_FAILED, the bytes of the reason why it does not pickle)."""
    try:
        status, data = _GOOD, _dumps(obj)
    except Exception as error:  # __reduce__ of any class may raise anything
        status, data = _FAILED, f"{type(obj).__qualname__}: {describe_error(error)}".encode(errors="backslashreplace")
    return status, torch.frombuffer(bytearray(data), dtype=torch.uint8)


def describe_error(error: BaseException) -> str:
    return _text_of(error) or type(error).__name__


@only_looks(None)
def _text_of(error: BaseException) -> str | None:
    return f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(".")


def _dumps(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        if find_spec("cloudpickle") is None:
            raise
        data: bytes = import_module("cloudpickle").dumps(obj, protocol=5)
        return data


def _unpacked(payload: Tensor) -> Any:
    return pickle.loads(payload.numpy().data)


def _raise_unpicklable(call: str, reason: Tensor, source: int, is_mine: bool) -> None:
    text = (
        f"{call}: the object of rank {source} cannot be pickled ({bytes(reason.tolist()).decode()}). Send only what it "
        f"is made of, or define its class or function at module level (or install cloudpickle)."
    )
    error = UsageError(text) if is_mine else HorovodInternalError(text)
    error.told_all = True
    raise error
