"""One parameter, one owner: its gradient is reduced once, however many wrappers have been made for it.

    made        a new wrapper takes its parameters over, frozen ones too: an old one may only be left over
    used        one that has lost some takes them back, if the other has not reduced anything since; else it refuses
    dropped     its parameters are free

So programs may wrap anew to resume, and keep wrappers that they do not use. Two that both reduce are an error, on every
rank at the same call, as all make and use them alike. Those that share may: an average of averages is the same. The one
that was used last holds the parameters then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from torch import Tensor

from hvlike.errors import UsageError
from hvlike.training.gradients.usage_errors import list_names


class Claim:
    """The right of one wrapper to reduce the gradients of its parameters; ends with this object. Calls are local."""

    def __init__(self, wrapper: str) -> None:
        """wrapper: the class that it belongs to, for errors."""
        self.wrapper = wrapper
        self.shares = False  # With others that share, too
        self.is_used = False  # Has reduced something since it last took parameters from another
        self.lost: dict[int, Tensor] = {}  # To other wrappers
        self._held: dict[int, Tensor] = {}

    def take_over(self, parameters: Iterable[Tensor]) -> None:
        """This wrapper is being made, for these: earlier ones lose them. They are free until `take` claims them."""
        for parameter in parameters:
            holder = _holders.pop(id(parameter), None)
            if holder is not None:
                holder._lose(id(parameter))

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Claim these and no others; those that another wrapper holds count as lost."""
        wanted = {id(parameter): parameter for parameter in parameters}
        for key in self._held.keys() - wanted.keys():
            del self._held[key], _holders[key]
        self.lost = {key: parameter for key, parameter in self.lost.items() if key in wanted}
        for key, parameter in wanted.items():
            if key in self._held or key in self.lost:
                continue
            if key in _holders:
                self.lost[key] = parameter
            else:
                self._hold(key, parameter)

    def settle(self, name_of: Callable[[Tensor], str], *, reduces: bool) -> None:
        """Take back what was lost, as this wrapper is used now; `reduces`: it will reduce.

        Raises: UsageError where another wrapper has reduced the gradients of these parameters.
        """
        if self._rivals():
            # One that was dropped may only wait for the garbage collector, on some ranks.
            gc.collect()
        rivals = self._rivals()
        if rivals:
            names = list_names([name_of(self.lost[key]) for key in rivals])
            raise UsageError(
                f"The gradients of {names} would be reduced twice: by this {self.wrapper}, and by a "
                f"{next(iter(rivals.values())).wrapper} of the same parameters that has reduced since that was made or "
                "used. Use one of them: a plain optimizer with a DistributedDataParallel, a ZeroRedundancyOptimizer "
                "without reduce_gradients. If the other is left over, drop it (del) before this one is used again."
            )
        for key, parameter in list(self.lost.items()):
            self._hold(key, parameter)
        self.lost = {}
        self.is_used = reduces

    def use(self, parameters: Sequence[Tensor]) -> None:
        """Settle what was lost of these, which have no names: this wrapper reduces now."""
        if self.lost:
            places = {parameter: f"parameter {place}" for place, parameter in enumerate(parameters)}
            self.settle(places.__getitem__, reduces=True)
        self.is_used = True

    @property
    def lost_to_sharers(self) -> bool:
        """Whether all that was lost and is held by others is held by such that share."""
        holders = [holder for holder in map(_holders.get, self.lost) if holder is not None]
        return self.shares and bool(holders) and all(holder.shares for holder in holders)

    def _rivals(self) -> dict[int, Claim]:
        holders = {key: _holders.get(key) for key in self.lost}
        return {
            key: holder
            for key, holder in holders.items()
            if holder is not None and holder.is_used and not (self.shares and holder.shares)
        }

    def _hold(self, key: int, parameter: Tensor) -> None:
        holder = _holders.get(key)
        if holder is not None and holder is not self:
            holder._lose(key)
        self._held[key] = parameter
        _holders[key] = self

    def _lose(self, key: int) -> None:
        self.lost[key] = self._held.pop(key)


_holders: WeakValueDictionary[int, Claim] = WeakValueDictionary()  # By the id of a parameter, which its holder keeps
