"""Join: the context manager that lets ranks have different numbers of inputs.

A heartbeat is one number that is summed up over the ranks in each iteration: 1 from ranks with inputs, 0 from others.
It is needed where a Joinable of the user's own communicates, and to throw on early termination. hvlike's own joinables
carry the count in their reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.operation import Operation
from hvlike.collectives.api.allreduce import allreduce_async
from hvlike.collectives.api.barrier_join import begin_join, end_join, find_common_rank, set_away, submit_join
from hvlike.collectives.requests.join_protocol import (
    JOIN_KEY,
    LEAVE_KEY,
    JoinEnd,
    JoinFailure,
    JoinScope,
    LeaveEnd,
    LeaveRequest,
)
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.requests.request import RequestKey
from hvlike.collectives.session.context import current
from hvlike.errors import (
    HorovodInternalError,
    InputsExhaustedError,
    JoinError,
    NotJoinableError,
    UsageError,
    WrongTypeError,
)
from hvlike.training.gradients.reduction import ranks_of_group
from hvlike.training.gradients.usage_errors import warn_user
from hvlike.training.joinable import BuiltInHook, Joinable, JoinConfig

WARN_THRESHOLD = 1000  # Iterations that a rank may miss without a warning


def _sum(handle: Operation) -> int:
    return int(handle.result().item())


def early_termination() -> RuntimeError:
    return RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")


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
        self._inside = False
        self._authority = -1

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
        self._rank = current().world.rank
        self._set_state = current().find_set(self._process_set, "Join")
        self._contexts = self._set_state.rounds
        self._number = number = self._contexts.enter()
        current().fabric.loop.perform(lambda: self._contexts.begin(number))
        self._inside = True
        self._authority = -1
        self._absent = False  # Some rank has missed an iteration. In post hooks.
        self._thrown = self._warned = False
        self._heartbeats = 0
        for place, joinable in enumerate(self._joinables):
            joinable._join_config = JoinConfig(True, self._throws, place == 0)
            joinable._join_context = self
        try:
            for hook in self._built_in:
                hook.joinable._join_begins(divides_by_active=hook.divides_by_active)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the body: see the class. Collective over the process set; blocks."""
        if not self._inside:
            return
        if value is None:
            try:
                self._finish()
            except BaseException as failure:
                self._leave(failure)
                raise
        self._leave(value)

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
        context._contexts.check()
        if context._thrown:
            raise early_termination()
        if not joinable._join_config.is_first_joinable:
            return None
        handle = context._heartbeat(active=True)
        if context._throws and _sum(handle) < context._set_state.group.size:
            context._thrown = True
            raise early_termination()
        return handle

    @property
    def _next_heartbeat(self) -> RequestKey:
        """Key of the heartbeat that begins next. Each has its own name: it may begin before the last one has ended."""
        return ("allreduce", f"Join.{self._number}.heartbeat.{self._heartbeats + 1}")

    def _heartbeat(self, *, active: bool) -> Operation:
        """Begin a heartbeat: its sum is the number of ranks with inputs. Collective over the set."""
        _, name = self._next_heartbeat
        self._heartbeats += 1
        mine = torch.tensor([float(active)], device="cpu")
        return allreduce_async(mine, name=name, op=ReduceOp.SUM, process_set=self._process_set)

    # After the body

    def _finish(self) -> None:
        """Take part in iterations of other ranks until none has inputs, then run the hooks. Collective; blocks."""
        if self._thrown:
            raise early_termination()
        for hook in self._built_in:
            hook.joinable._join_leaves()
        self._contexts.check()
        if self._throws:
            if _sum(self._heartbeat(active=False)):
                self._thrown = True
                raise InputsExhaustedError(f"Rank {self._rank} exhausted all inputs.")
            missed, last = 0, self._rank
        else:
            missed, last = self._stand_in()
        self._authority, self._absent = find_common_rank(f"Join.{self._number}", missed, last, self._process_set)
        is_last_joiner = not missed
        for each in self._hooks:
            if isinstance(each, BuiltInHook):
                each.joinable._join_ends(self)
            else:
                # By position, as torch does: a hook may give its parameter another name.
                each.post_hook(is_last_joiner)

    def _stand_in(self) -> tuple[int, int]:
        """Return how many iterations this rank has missed, and the rank that joined last."""
        set_state = self._set_state
        planned, marks = set_state.proxies.planned, set_state.proxies.marks()
        everything = not self._beats
        try:
            set_away(set_state, True, inline=everything)
            set_state.proxies.check_idle("The Join context was left")
            scope = JoinScope.EVERYTHING if everything else JoinScope.PLANS
            handle = begin_join(set_state, planned, marks, scope, f"left its Join context of {self._what}")
            missed = self._run_main_hooks() if self._beats else 0
            end: JoinEnd = self._wait_beside_proxies(JOIN_KEY, handle).result()
            end_join([set_state], [end])
        finally:
            set_away(set_state, False)
        return max(missed, set_state.proxies.missed), end.last

    def _run_main_hooks(self) -> int:
        missed = 0
        while _sum(self._wait_beside_proxies(self._next_heartbeat, self._heartbeat(active=False))):
            for hook in self._hooks:
                hook.main_hook()
            missed += 1
            self._warn(missed)
        return missed

    def _wait_beside_proxies(self, key: RequestKey, handle: Operation) -> Operation:
        """Wait, while proxies take part in planned steps; raise their errors: other ranks would wait for this one."""
        proxies = self._set_state.proxies

        def has_news() -> bool:
            warn = proxies.missed > WARN_THRESHOLD and not self._warned
            return handle.done() or warn or proxies.error() is not None

        while not handle.done():
            self._set_state.controller.wait(key, has_news, None)
            self._warn(proxies.missed)
            error = proxies.error()
            if error is not None and not handle.done():
                raise error
        return handle

    def _warn(self, missed: int) -> None:
        if missed > WARN_THRESHOLD and not self._warned:
            self._warned = True
            warn_user(
                f"Detected uneven input skew of greater than {WARN_THRESHOLD}. This means that rank {self._rank} has "
                f"at least {WARN_THRESHOLD} fewer inputs than other currently-active ranks. This level of skew could "
                "lead to performance degradation during training.",
                UserWarning,
            )

    # The end

    def _leave(self, error: BaseException | None) -> None:
        """Leave together with all other ranks; `error` is what this rank raises. Collective over the set; blocks."""
        self._inside = False
        try:
            self._leave_with_all(error)
        finally:
            for joinable in self._joinables:
                joinable._join_config = JoinConfig.construct_disabled_join_config()
                joinable._join_context = None

    def _leave_with_all(self, error: BaseException | None) -> None:
        controller = self._set_state.controller
        if error is not None and not isinstance(error, JoinError) and not self._thrown:
            failure = JoinFailure(self._describe(error), self._set_state.proxies.steps())
            controller.report_failure(self._number, failure)
        failed = error is not None
        try:
            proxies = self._set_state.proxies
            request = LeaveRequest(controller.names.counts(), proxies.spare_queues(), failed)
            handle = submit_join(self._set_state, LEAVE_KEY, request, self._contexts.end)
            if error is not None and not isinstance(error, (Exception, KeyboardInterrupt)):
                # The program ends: wait for no other rank.
                return
            end: LeaveEnd = handle.result()
            failed = end.failed
        except HorovodInternalError:
            failed = True
            current().fabric.loop.perform(lambda: self._contexts.end(None))
            if error is None:
                raise
            return
        finally:
            # Only now have all half-done steps ended.
            for hook in self._built_in:
                if failed:
                    hook.joinable._join_fails()
        if error is None and end.error is not None:
            raise JoinError(str(end.error))

    def _describe(self, error: BaseException) -> JoinError:
        text = f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(".")
        return JoinError(
            f"Rank {self._rank} has left the Join context of {self._what} with {text}. All ranks have left it. They "
            "may have made different numbers of steps: broadcast one rank's parameters before you go on."
        )


def _common_process_set(joinables: Sequence[Joinable]) -> ProcessSet:
    sets = [ranks_of_group(joinable.join_process_group) or global_process_set for joinable in joinables]
    if any(each is not sets[0] for each in sets):
        raise UsageError("Using join context manager with multiple process groups")
    if not isinstance(sets[0], ProcessSet):
        raise UsageError(f"join_process_group has to be a ProcessSet, got {type(sets[0]).__name__}.")
    return sets[0]
