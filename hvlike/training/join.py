"""Join: the context manager that lets ranks have different numbers of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hvlike.backends.operation import Operation
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.errors import NotJoinableError, UsageError, WrongTypeError
from hvlike.training.gradients.reduction import ranks_of_group
from hvlike.training.join_round import JoinRound
from hvlike.training.joinable import BuiltInHook, Joinable, JoinConfig


class Join:
    """Let the ranks of a process set have different numbers of inputs.

    A rank that has ended the body takes part in the reductions of the others until all have; then the hooks of the
    joinables make the ranks equal. hvlike's own joinables (DistributedOptimizer, DistributedDataParallel,
    ZeroRedundancyOptimizer) cost no message in an iteration. With one of your own, or with throw_on_early_termination,
    the first joinable sums up one number over the ranks in each iteration.

    Making and entering it is local; leaving it is collective over the process set, and blocks. On a rank outside of
    the process set it does nothing. An exception in the body leaves the context on all ranks: unchanged on the rank
    that raises it, as JoinError, which names that rank, on the others.

    Args:
        joinables: At least one, the same on every rank. Their hooks run in this order.
        enable: False makes the context do nothing, for inputs that are known to be even.
        throw_on_early_termination: End on all ranks, with RuntimeError, as soon as one has no more inputs.
        kwargs: Passed to every `join_hook`.

    Raises:
        UsageError: (a ValueError) No joinables, several process sets, or joinables that are in a context already.
        JoinError: Another rank has left the context with an exception.
        RuntimeError: With throw_on_early_termination, a rank has no more inputs.

    Example:
        with Join([model, optimizer]):
            for batch in batches:
                train(batch)

    Source: torch.distributed.algorithms.join.Join.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        if not self._joinables:
            raise UsageError("The join context manager requires at least one joinable")
        for joinable in self._joinables:
            if not isinstance(joinable, Joinable):
                raise WrongTypeError(f"Join expects instances of hvlike.join.Joinable, got {type(joinable).__name__}.")
        if len({id(joinable) for joinable in self._joinables}) < len(self._joinables):
            raise UsageError("Join was given the same joinable twice. List each once.")
        self._process_set = _common_process_set(self._joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._built_in = [each for each in self._hooks if isinstance(each, BuiltInHook)]
        planned = len(self._built_in) == len(self._hooks) and all(each.main is None for each in self._built_in)
        self._enable = enable
        self._throws = throw_on_early_termination
        self._beats = self._throws or not planned
        self._what = ", ".join(type(joinable).__name__ for joinable in self._joinables)
        self._round: JoinRound | None = None  # While the context is entered
        self._authority = -1
        self._absent = False  # Some rank has missed an iteration. In post hooks.

    @property
    def authority(self) -> int:
        """The rank of the job whose state all have taken over, after the context: the highest that missed no iteration.

        Where the context does nothing, the highest rank of the process set.
        """
        return self._authority if self._authority >= 0 else (self._process_set.ranks or [0])[-1]

    def __enter__(self) -> Join:
        """Begin the body. Local."""
        if not self._enable or not self._process_set.included():
            return self
        for joinable in self._joinables:
            if getattr(joinable, "_join_context", None) is not None:
                raise UsageError(f"{type(joinable).__name__} is in a Join context already. Leave that one first.")
        running = self._round = JoinRound(self._process_set, self._what)
        self._authority, self._absent = -1, False
        for place, joinable in enumerate(self._joinables):
            joinable._join_config = JoinConfig(True, self._throws, place == 0)
            joinable._join_context = self
        try:
            for hook in self._built_in:
                hook.joinable._join_begins(divides_by_active=hook.divides_by_active)
        except BaseException as error:
            self._leave(running, error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the body: see the class. Collective over the process set; blocks."""
        running = self._round
        if running is None:
            return
        if value is None:
            try:
                self._finish(running)
            except BaseException as failure:
                self._leave(running, failure)
                raise
        self._leave(running, value)

    # In the body

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Operation | None:
        """Tell the context that this rank has inputs, in each iteration before the collective operations of a Joinable.

        Collective in effect. Blocks only where the context throws on early termination.

        Args:
            joinable: The caller.

        Returns:
            The handle of the sum over the ranks, where this is the first joinable and a sum is needed; else None.

        Raises:
            RuntimeError: On early termination.
            JoinError: Another rank has left the context with an exception.
            AssertionError: The Joinable has not called the constructor of its base class.
        """
        if not hasattr(joinable, "_join_config"):
            raise NotJoinableError(f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor")
        context = joinable._join_context
        if context is None or not context._beats:
            # A planned reduction finds a failed rank by itself, in the same step on every rank.
            return None
        running = context._round
        assert running is not None
        return running.beat(throws=context._throws, is_first=joinable._join_config.is_first_joinable)

    # After the body

    def _finish(self, running: JoinRound) -> None:
        """Take part in iterations of other ranks until none has inputs, then run the hooks. Collective; blocks."""
        missed, self._authority, self._absent = running.finish(self._hooks, beats=self._beats, throws=self._throws)
        for hook in self._hooks:
            if isinstance(hook, BuiltInHook):
                hook.joinable._join_ends(self)
            else:
                # By position, as torch does: a hook may give its parameter another name.
                hook.post_hook(not missed)

    def _leave(self, running: JoinRound, error: BaseException | None) -> None:
        """Leave together with all other ranks; `error` is what this rank raises. Collective over the set; blocks."""
        try:
            running.leave(self._built_in, error)
        finally:
            for joinable in self._joinables:
                joinable._join_config = JoinConfig.construct_disabled_join_config()
                joinable._join_context = None
            self._round = None


def _common_process_set(joinables: Sequence[Joinable]) -> ProcessSet:
    sets = [ranks_of_group(joinable.join_process_group) or global_process_set for joinable in joinables]
    if any(each is not sets[0] for each in sets):
        raise UsageError("Using join context manager with multiple process groups")
    if not isinstance(sets[0], ProcessSet):
        raise UsageError(f"join_process_group has to be a ProcessSet, got {type(sets[0]).__name__}.")
    return sets[0]
