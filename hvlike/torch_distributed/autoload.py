"""What `import torch` runs (entry point torch.backends): torch.distributed learns the name of the backend "hvlike".

Every program that imports torch pays for this file where hvlike is installed: it imports nothing but what torch has
imported already, and no fault in it ends the import of torch. The backend itself is imported when a group is made.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

BACKEND_NAME = "hvlike"
OLDEST_TORCH = (2, 7)  # Older ones lose works of Python in C++, and wait for them for ever


def register() -> None:
    """Register the backend, unless that is done already. Never raises."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, BACKEND_NAME.upper()):
            dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=_devices())
            backend: Any = dist.Backend
            backend._plugins = _Plugins(backend._plugins)
            _extend_rendezvous()
    except Exception as error:
        _warn(error)


def _devices() -> list[str]:
    """The kinds of devices whose tensors the backend takes: also what this torch was built for, such as XPUs."""
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    built_for = None if accelerator is None else accelerator.current_accelerator()
    return list(dict.fromkeys(["cpu", "cuda", *([] if built_for is None else [built_for.type])]))


class _Plugins(dict[str, Any]):
    """The backends that were registered, but for this one, which is there in every program.

    Where torch.distributed sees any, "cpu:gloo" has no default backend (torch 2.13, _new_process_group_helper).
    """

    def keys(self) -> Any:
        return [name for name in self if name != BACKEND_NAME.upper()]


def _warn(error: Exception) -> None:
    text = (
        f"torch.distributed has no backend {BACKEND_NAME!r}: registering it failed: {type(error).__name__}: {error}. "
        "hvlike needs torch 2.5 or newer. Programs that do not use the backend are not affected. To have torch "
        "load no such extensions, set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        # Warnings are errors here, but `import torch` shall go on.
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr)


def _create(options: Any, pg_options: Any) -> Any:
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        from hvlike.errors import UsageError

        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(
            f"The backend {BACKEND_NAME!r} of torch.distributed needs torch {oldest} or newer, got "
            f"{torch.__version__}. Update torch, or use hvlike without torch.distributed: hvlike.DistributedOptimizer "
            "and hvlike.nn.DistributedDataParallel work with this one."
        )
    from hvlike.torch_distributed.process_group import create

    return create(options, pg_options)


def _extend_rendezvous() -> None:
    """init_process_group without init_method, store and MASTER_ADDR asks hvlike for rank and store."""
    # The package has a function of the same name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    of_torch = handlers["env"]

    def from_environment(url: str, **arguments: Any) -> Iterator[tuple[Any, int, int]]:
        # The handler is not told which backend asks; init_process_group calls it, and has a parameter of this name.
        backend = sys._getframe(1).f_locals.get("backend")
        if BACKEND_NAME not in str(backend).lower().replace(":", ",").split(","):
            yield from of_torch(url, **arguments)
            return
        from hvlike.torch_distributed.store import find_place

        yield find_place(url)

    handlers["env"] = from_environment
