"""Ranks with different numbers of inputs: torch.distributed.algorithms.join's names, and Horovod's join().

    from hvlike.join import Join, Joinable, JoinHook

`hvlike.join` is both: the function of Horovod's name, and where these names are found.
"""

from __future__ import annotations

from hvlike.collectives.api.barrier_join import join as join_all
from hvlike.training.join.join import Join
from hvlike.training.join.joinable import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "join"]


class _Joining:
    """Takes the place of this module as an attribute of the package: a call of it is Horovod's join()."""

    __doc__ = join_all.__doc__

    Join = Join
    JoinHook = JoinHook
    Joinable = Joinable

    def __call__(self, device: int = -1) -> int:
        return join_all(device)


join = _Joining()
