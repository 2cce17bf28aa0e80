"""DistributedOptimizer with the attributes that programs touch on Horovod's, whose class says that it is of Horovod."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from hvlike.training import distributed_optimizer

_PLACE = "horovod.torch.optimizer"


class DistributedOptimizer(distributed_optimizer.DistributedOptimizer):
    """Programs find Horovod's optimizers by `"horovod" in str(type(optimizer))`; `__class__` is the wrapped one's."""

    __module__ = _PLACE

    @property  # type: ignore[misc]  # as in the class that it is derived from
    def __class__(self) -> type:
        """A class named like the wrapped optimizer's and derived from it, as Horovod makes one."""
        wrapped = self.__dict__.get("_wrapped")
        return type(self) if wrapped is None else _named_class(type(wrapped))  # type: ignore[arg-type]

    @property
    def _handles(self) -> dict[Tensor, tuple[Any, Any]]:
        """Parameters whose gradients are being reduced; not what they are reduced with. A copy."""
        return dict.fromkeys(self._gradients.being_reduced(), (None, None))

    @property
    def _requires_update(self) -> set[Tensor]:
        """Parameters whose gradients are reduced. A copy."""
        return set(self._gradients.names())

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """A copy."""
        return self._gradients.names()

    @property
    def _should_synchronize(self) -> bool:
        """Whether step() reduces the gradients: False inside of skip_synchronize(), or when a program sets it."""
        return not self._skipping

    @_should_synchronize.setter
    def _should_synchronize(self, value: bool) -> None:
        self._skipping = not value


_DistributedOptimizer = DistributedOptimizer


@functools.cache
def _named_class(wrapped: Any) -> type:
    return type(wrapped.__name__, (wrapped,), {"__module__": _PLACE})
