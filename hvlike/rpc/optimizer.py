"""DistributedOptimizer: steps parameters on the workers that own them, with the gradients of one autograd context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvlike.errors import UsageError, WorkerLostError, WrongTypeError
from hvlike.rpc.agent.calls import rpc_async
from hvlike.rpc.rrefs.rref import RRef
from hvlike.rpc.wire.autograd_hooks import autograd_hooks, in_context
from hvlike.rpc.wire.message import WorkerInfo
from hvlike.system.system import of_process, system


class _Stepping:
    def __init__(self) -> None:
        self.lock = system.Lock()
        """Held by the one optimizer that steps on this worker, because it uses the `.grad` of its parameters."""


_stepping = of_process(_Stepping)


class DistributedOptimizer:
    """An optimizer of parameters that live on several workers: one local optimizer on each owner.

    Any worker can make one; blocks until every owner has its optimizer. Several may be made for the same parameters, on
    different workers too; each has its own state.

    Args:
        optimizer_class: A class of torch.optim's form; travels by its name. Every owner calls
            `optimizer_class(parameters, *args, **kwargs)` with its own parameters, in the order of their RRefs.
        params_rref: RRefs of parameters (leaf tensors) of any workers, any number for each.
        *args: Further positional arguments of optimizer_class.
        **kwargs: Keyword arguments of optimizer_class.

    Raises:
        UsageError: For anything but an RRef.
        Exception: The errors of the constructor, after all owners have answered.

    Example:
        with hvlike.autograd.context() as context_id:
            hvlike.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Source: torch.distributed.optim.DistributedOptimizer.
    """

    remote_optimizers: list[RRef[LocalOptimizer]]
    """One for each owner."""

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        owners = _group_by_owner(params_rref)
        calls = [(owner, (optimizer_class, rrefs, args, kwargs)) for owner, rrefs in owners.items()]
        self.remote_optimizers = _ask_all("could not make its optimizer", _create, calls)

    def step(self, context_id: int) -> None:
        """Step every parameter once with its gradient in the context; one without a gradient there does not change.

        Any worker can call it; blocks until all owners have stepped. Steps of different callers take turns on each
        owner; a step may come between the forward and the backward of another caller. `.grad` stays as it was.

        Args:
            context_id: Id of a context that this worker knows, after its backward.

        Raises:
            RuntimeError: For an unknown context.
            TypeError: For an id that is no int.
            Exception: The errors of the optimizers, after all owners have answered; the other owners have stepped then.
        """
        if not isinstance(context_id, int) or isinstance(context_id, bool):
            raise WrongTypeError(
                f"step(): incompatible function arguments: context_id must be an int, got {context_id!r}; pass what "
                "`with hvlike.autograd.context() as context_id` gives."
            )
        autograd_hooks().gradients(context_id)
        calls = [(rref.owner(), (rref, context_id)) for rref in self.remote_optimizers]
        # An owner that the forward pass has not reached learns of the context through this call.
        with in_context(context_id):
            _ask_all("could not step", _step, calls)


class LocalOptimizer(NamedTuple):
    """The part of a DistributedOptimizer on one owner."""

    optimizer: torch.optim.Optimizer
    parameters: list[Tensor]


def _group_by_owner(params_rref: Iterable[RRef[Any]]) -> dict[WorkerInfo, list[RRef[Any]]]:
    owners: dict[WorkerInfo, list[RRef[Any]]] = {}
    for place, rref in enumerate(params_rref):
        if not isinstance(rref, RRef):
            raise UsageError(
                f"DistributedOptimizer: params_rref[{place}] must be an RRef of a parameter, got "
                f"{type(rref).__name__}; wrap a parameter of this worker as hvlike.rpc.RRef(parameter)."
            )
        owners.setdefault(rref.owner(), []).append(rref)
    if not owners:
        raise UsageError("DistributedOptimizer: optimizer got an empty parameter list; pass at least one RRef.")
    return owners


def _ask_all(failed: str, function: Callable[..., Any], calls: list[tuple[WorkerInfo, tuple[Any, ...]]]) -> list[Any]:
    """Call the function on all owners. Raises: their errors as one, when all have answered."""
    futures = [_attempt(partial(rpc_async, owner, function, args)) for owner, args in calls]
    answers = [_attempt(future.wait) if error is None else (None, error) for future, error in futures]
    errors = {owner: error for (owner, _), (_, error) in zip(calls, answers, strict=True) if error is not None}
    if not errors:
        return [answer for answer, _ in answers]
    try:
        raise _as_one(failed, errors, len(calls))
    finally:
        # The error holds this frame, which must not hold the error: the RRefs in it would stay alive.
        del answers, errors


def _as_one(failed: str, errors: dict[WorkerInfo, Exception], owners: int) -> Exception:
    """Return one error for all: a WorkerLostError if one is; a ValueError or TypeError if all are."""
    if len(errors) == 1:
        return next(iter(errors.values()))
    lost = [error.ranks for error in errors.values() if isinstance(error, WorkerLostError)]
    kinds = {type(error) for error in errors.values()}
    kind = kinds.pop() if len(kinds) == 1 and kinds <= {ValueError, TypeError} else RuntimeError
    told = "\n".join(f"{owner.name} (rank {owner.id}) {failed}: {error}" for owner, error in errors.items())
    text = f"{len(errors)} of {owners} owners failed.\n{told}"
    return WorkerLostError(text, frozenset().union(*lost)) if lost else kind(text)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _create(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    rrefs: list[RRef[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[LocalOptimizer]:
    """Runs on an owner."""
    parameters = [rref.local_value() for rref in rrefs]
    return RRef(LocalOptimizer(optimizer_class(parameters, *args, **kwargs), parameters))


def _step(local: RRef[LocalOptimizer], context_id: int) -> None:
    """Step with the gradients of a context, which are in `.grad` meanwhile. Runs on an owner."""
    optimizer, parameters = local.local_value()
    gradients = autograd_hooks().gradients(context_id)
    with _stepping.lock:
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = gradients.get(parameter)
            optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
