"""One pass through a Join context, from its entry until all ranks have left it.

    body          heartbeats, where they are needed
    stand_in()    this rank is out of inputs, and takes part in what the others do until none has any
    leave()       with all ranks, or with an error of this one, which all learn of

A heartbeat is one number that is summed up over the ranks in each iteration: 1 from ranks with inputs, 0 from others.
It is needed where a Joinable of the user's own communicates, and to throw on early termination. hvlike's own joinables
carry the count in their reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.request import RequestKey
from hvlike.collectives.session.context import current
from hvlike.errors import HorovodInternalError, InputsExhaustedError, JoinError
from hvlike.training.gradients.usage_errors import warn_user
from hvlike.training.joinable import BuiltInHook, JoinHook

WARN_THRESHOLD = 1000  # Iterations that a rank may miss without a warning


def _sum(handle: Operation) -> int:
    return int(handle.result().item())


def early_termination() -> RuntimeError:
    """Return what all ranks raise when the first one has no more inputs, if they are to."""
    return RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")


class JoinRound:
    """What a rank does with the others in one pass. Not thread-safe: the thread that has entered makes all calls."""

    def __init__(self, process_set: ProcessSet, what: str) -> None:
        """Enter. Local. what: the joinables, for errors."""
        self._process_set = process_set
        self._what = what
        self._rank = current().world.rank
        self._set_state = current().find_set(process_set, "Join")
        self._contexts = contexts = self._set_state.rounds
        self._number = number = contexts.enter()
        current().fabric.loop.perform(lambda: contexts.begin(number))
        self._thrown = self._warned = False
        self._heartbeats = 0

    # In the body

    def beat(self, *, throws: bool, is_first: bool) -> Operation | None:
        """Say that this rank has inputs: with the first joinable of an iteration. Blocks only if it `throws`."""
        self._contexts.check()
        if self._thrown:
            raise early_termination()
        if not is_first:
            return None
        handle = self._heartbeat(active=True)
        if throws and _sum(handle) < self._set_state.group.size:
            self._thrown = True
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

    def finish(self, hooks: Sequence[JoinHook], *, beats: bool, throws: bool) -> tuple[int, int, bool]:
        """Take part in iterations of other ranks until none has inputs. Collective; blocks.

        Returns how many iterations this rank has missed, the rank whose state all take over, and whether some rank has
        missed an iteration.
        """
        if self._thrown:
            raise early_termination()
        for hook in hooks:
            if isinstance(hook, BuiltInHook):
                hook.joinable._join_leaves()
        self._contexts.check()
        if throws:
            if _sum(self._heartbeat(active=False)):
                self._thrown = True
                raise InputsExhaustedError(f"Rank {self._rank} exhausted all inputs.")
            missed, last = 0, self._rank
        else:
            missed, last = self._stand_in(hooks, beats=beats)
        return missed, *find_common_rank(f"Join.{self._number}", missed, last, self._process_set)

    def _stand_in(self, hooks: Sequence[JoinHook], *, beats: bool) -> tuple[int, int]:
        """Return how many iterations this rank has missed, and the rank that joined last."""
        set_state = self._set_state
        planned, names = set_state.proxies.planned, set_state.proxies.names()
        try:
            set_away(set_state, True, inline=not beats)
            set_state.proxies.check_idle("The Join context was left")
            scope = JoinScope.PLANS if beats else JoinScope.EVERYTHING
            handle = begin_join(set_state, planned, names, scope, f"left its Join context of {self._what}")
            missed = self._run_main_hooks(hooks) if beats else 0
            end: JoinEnd = self._wait_beside_proxies(JOIN_KEY, handle).result()
            end_join([set_state], [end])
        finally:
            set_away(set_state, False)
        return max(missed, set_state.proxies.missed), end.last

    def _run_main_hooks(self, hooks: Sequence[JoinHook]) -> int:
        missed = 0
        while _sum(self._wait_beside_proxies(self._next_heartbeat, self._heartbeat(active=False))):
            for hook in hooks:
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

    def leave(self, hooks: Sequence[BuiltInHook], error: BaseException | None) -> None:
        """Leave together with all other ranks; `error` is what this rank raises. Collective over the set; blocks."""
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
            for hook in hooks:
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
