"""Where a remote module lives: "worker1/cpu", "worker1/cuda:0", "worker1", "rank:1/cpu" or "rank:1"."""

from typing import NamedTuple

import torch

from hvlike.errors import UsageError

FORMS = "'<worker>', '<worker>/cpu', '<worker>/cuda:<number>', or 'rank:<rank>' in the place of the worker"


class Placement(NamedTuple):
    """A worker, by name or by rank, and a device of it."""

    on: str | int
    device: str


def parse_placement(text: str) -> Placement:
    """Read a placement.

    Returns the worker as a name or an int rank, unchecked against the workers that exist, and its device.
    Raises: UsageError for any other form, for a device without a worker, and for a device that is no CPU and no GPU.
    Source: the forms that torch.distributed.nn.RemoteModule takes.
    """
    if not isinstance(text, str):
        raise UsageError(f"a remote device is a string such as {FORMS}, got {text!r}")
    worker, slash, device = text.partition("/")
    if not slash and is_device(worker):
        raise UsageError(f"remote device {text!r} names no worker; write {FORMS}")
    rank = worker.removeprefix("rank:")
    by_rank = worker.startswith("rank:") and rank.isdecimal()
    if not worker or (":" in worker and not by_rank) or (slash and not is_device(device)):
        raise UsageError(f"Could not parse remote_device: {text!r}. The valid forms are {FORMS}")
    device = device or "cpu"
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UsageError(f"remote device {text!r}: modules are placed on a CPU or a GPU; write {FORMS}")
    return Placement(int(rank) if by_rank else worker, device)


def is_device(text: str) -> bool:
    """Whether torch knows a device of this name."""
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
