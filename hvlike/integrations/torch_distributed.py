"""torch.distributed over hvlike: for libraries that gather metrics, broadcast objects or save checkpoints with it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvlike.collectives import lifecycle
from hvlike.errors import UsageError
from hvlike.integrations.process_group import NAME, ProcessGroup


def init_process_group() -> None:
    """Start torch.distributed over all ranks of hvlike, which is started too if it does not run.

    torch.distributed's collectives, of tensors and of objects, then go through hvlike: no MASTER_ADDR, no rendezvous,
    no second network. Groups (torch.distributed.new_group) have all ranks; send and recv are not there. Does nothing
    where that is so already. torch.distributed.destroy_process_group ends it.
    Collective: every rank calls it. Blocks until all have.
    Raises: UsageError where torch.distributed runs with another backend; as hvlike.init otherwise.
    Source: torch.distributed.init_process_group.
    """
    lifecycle.init()
    if dist.is_initialized():
        if dist.get_backend() != NAME:
            raise UsageError(
                f"torch.distributed runs with the backend {dist.get_backend()!r} already. Call hvlike's "
                "init_process_group() first, or torch.distributed.destroy_process_group() before it."
            )
        return
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=_NO_STORE, rank=lifecycle.rank(), world_size=lifecycle.size())


# Its methods are typed one by one; here they are all alike.
_Base: Any = Store


class NoStore(_Base):
    """What torch.distributed asks for, in which the ranks do not meet: they do by MPI.

    Another backend would wait in it for the other ranks, for half an hour.
    """

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise UsageError(
            "torch.distributed over hvlike has no store, which a group with another backend (gloo, nccl) needs. Use "
            "the default group, or start torch.distributed by its own means and without hvlike."
        )

    set = get = add = wait = check = append = compare_set = multi_set = multi_get = _refuse


# Made once and kept: torch keeps only the part of it that is not Python.
_NO_STORE = NoStore()


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    if size != lifecycle.size():
        raise UsageError(
            f"torch.distributed over hvlike has groups of all {lifecycle.size()} ranks only, got one of {size}. For "
            "some of the ranks use hvlike.add_process_set."
        )
    return ProcessGroup(rank, size)
