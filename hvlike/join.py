"""Ranks with different numbers of inputs: the names of torch.distributed.algorithms.join, and Horovod's join().

    from hvlike.join import Join, Joinable, JoinHook

`hvlike.join` is both: the function of Horovod's name, and where these names are found.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

from hvlike.collectives.api.barrier_join import join as join_all
from hvlike.training.join import Join
from hvlike.training.joinable import Joinable, JoinHook
from hvlike.untraced import keep_untraced, untraced

__all__ = ["Join", "JoinHook", "Joinable", "join"]


@untraced
class _Joining(ModuleType):
    """What this module is: a call of it is Horovod's join()."""

    def __call__(self, device: int = -1) -> int:
        return join_all(device)


keep_untraced(globals())
sys.modules[__name__].__class__ = _Joining
join = cast("_Joining", sys.modules[__name__])
join.__doc__ = f"{join_all.__doc__}\n{__doc__}"
