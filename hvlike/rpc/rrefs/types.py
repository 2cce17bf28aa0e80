"""The type of a value on its owner, for proxies: asked for once, then kept with the RRef."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvlike.errors import RpcError
from hvlike.rpc import calls
from hvlike.rpc.functions import async_execution
from hvlike.rpc.futures import Promise
from hvlike.rpc.rrefs.entry import Entry

if TYPE_CHECKING:
    from hvlike.rpc.rref import RRef


def find_type(rref: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """A future of the type of the value of `rref`; the same one while it has not failed. Does not block."""
    found = rref.type_future
    # Who waited for a failure may be back before its callback has run.
    if found is not None and not _has_failed(found):
        return found
    if rref.creation is not None:
        rref.creation.check()
    if isinstance(rref.held, Entry) and rref.held.settled and rref.held.failure is None:
        promise = Promise()
        promise.set_result(type(rref.held.value))
        found = promise.future
    else:
        found = calls.rpc_async(rref.owner(), _rref_typeof_on_owner, (rref,), timeout=timeout)
    rref.type_future = found
    found.add_done_callback(partial(_forget_failure, rref))
    return found


def _has_failed(found: torch.futures.Future[Any]) -> bool:
    try:
        if found.done():
            found.value()
    except Exception as error:
        # Its frames hold the RRef, and the collector of garbage does not see into torch's futures.
        error.__traceback__ = None
        return True
    return False


def _forget_failure(rref: RRef[Any], found: torch.futures.Future[Any]) -> None:
    # Asked again next time: it may have been the time limit. Whoever waits for the future gets the error.
    if _has_failed(found) and rref.type_future is found:
        rref.type_future = None


@async_execution
def _rref_typeof_on_owner(rref: RRef[Any]) -> torch.futures.Future[Any]:
    """Runs on the owner; no thread waits while the value is computed."""
    promise = Promise()

    def answer() -> None:
        try:
            promise.set_result(type(rref.local_value()))
        except Exception as error:
            promise.set_error(error.with_traceback(None))

    if not isinstance(rref.held, Entry):
        raise RpcError(f"{rref.name} has come to a worker that does not own it.")
    rref.session.when_settled(rref.held, answer)
    return promise.future
