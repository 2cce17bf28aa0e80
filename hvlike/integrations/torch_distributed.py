"""torch.distributed over hvlike, for libraries that gather metrics, broadcast objects or save checkpoints with it."""

from __future__ import annotations

import torch.distributed as dist

from hvlike.errors import UsageError
from hvlike.torch_distributed.autoload import BACKEND_NAME


def init_process_group() -> None:
    """Start torch.distributed over all ranks of hvlike, and hvlike if it is not initialised.

    The same as torch.distributed.init_process_group("hvlike"), but does nothing if that is done already.
    torch.distributed.destroy_process_group ends it.
    Collective: every rank calls it. Blocks until all have.

    Raises:
        UsageError: Where torch.distributed runs with another backend.
        LaunchError: As hvlike.init.

    Example:
        >>> init_process_group()
        >>> torch.distributed.all_reduce(tensor)

    Source: torch.distributed.init_process_group.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND_NAME)
    elif BACKEND_NAME not in dist.get_backend():
        raise UsageError(
            f"torch.distributed runs with the backend {dist.get_backend()!r} already. Call hvlike's "
            "init_process_group() first, or torch.distributed.destroy_process_group() before it."
        )
