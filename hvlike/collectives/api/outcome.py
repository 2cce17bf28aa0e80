"""Work that can fail on one rank between two collectives: all ranks learn how it went before they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.api.objects import allgather_object, describe_error
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.basics import rank
from hvlike.errors import HorovodInternalError, HvlikeError, UsageError

T = TypeVar("T")


def settle(
    call: str,
    work: Callable[[], T],
    process_set: ProcessSet | None = None,
    *,
    as_it_is: bool = False,
    name: str | None = None,
) -> T:
    """Return what `work` has returned on this rank, once it has ended well on all ranks of the set.

    A rank that raised alone would leave the others waiting in the collective that follows.
    Collective: an allreduce of one number; blocks.

    Args:
        call: What the user has called, for errors.
        work: Does it on this rank. What it raises on all ranks together ends this call, too.
        process_set: The ranks.
        as_it_is: What the program's own code raises is raised again, not as the cause of a UsageError.
        name: The same on all ranks. Reports of ranks that wait or disagree show it: the name of the user's call.

    Raises:
        UsageError: On a rank where the work has failed; an error of hvlike is raised as it is.
        HorovodInternalError: On the other ranks. Both name the ranks and the causes.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except HorovodInternalError:
        # The ranks together could not do it: the others know.
        raise
    except Exception as error:
        if getattr(error, "told_all", False):
            raise
        failure = error
    flag = torch.tensor(int(failure is not None), dtype=torch.int32, device="cpu")
    if not int(allreduce(flag, op=ReduceOp.MAX, name=name, process_set=process_set)):
        return result  # type: ignore[return-value]  # `work` has ended
    mine = (rank(), None if failure is None else describe_error(failure))
    causes = [f"rank {number}: {cause}" for number, cause in allgather_object(mine, process_set=process_set) if cause]
    text = f"{call}: {'; '.join(causes)}. All ranks have stopped here, and can go on."
    if failure is None:
        raise HorovodInternalError(text)
    keeps = as_it_is or isinstance(failure, HvlikeError)
    raised: Any = failure if keeps else UsageError(text)
    raised.told_all = True
    if keeps:
        raise raised
    raise raised from failure
