"""One Join context on one rank, from the first line of its body until all ranks have left it.

A heartbeat is one number that is summed up over the ranks in each iteration: 1 from ranks with inputs, 0 from others.
It is needed where a Joinable of the user's own communicates, and to throw on early termination. hvlike's own joinables
carry the count in their reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend
from hvlike.backends.op_queue import Job
from hvlike.collectives.api.allreduce import allreduce_async
from hvlike.collectives.api.barrier_join import begin_join, end_join, set_away
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
from hvlike.collectives.requests.request import Handle, RequestKey, RequestSpec
from hvlike.collectives.session.context import current
from hvlike.collectives.session.submission import submit
from hvlike.errors import HorovodInternalError, InputsExhaustedError, JoinError
from hvlike.training.join.joinable import BuiltInHook, JoinHook
from hvlike.training.usage_errors import warn_user
from hvlike.transport.loop.coroutine import Coroutine

WARN_THRESHOLD = 1000
"""Iterations that a rank may miss without a warning."""


class JoinContext:
    """What one rank does in a context; hooks of hvlike's own joinables see it."""

    def __init__(self, hooks: Sequence[JoinHook], process_set: ProcessSet | None, what: str, *, throws: bool) -> None:
        """Local.

        Args:
            hooks: Those of the joinables, in their order.
            process_set: The ranks; None for all.
            what: The joinables, for errors.
            throws: All ranks leave when the first one has no inputs.
        """
        self.process_set = process_set
        self.authority = -1
        """The rank of the job whose state all take over: the highest that has missed no iteration. In post hooks."""
        self.absent = False
        """Some rank has missed an iteration. In post hooks."""
        self._hooks = list(hooks)
        self._built_in = [each for each in hooks if isinstance(each, BuiltInHook)]
        self._what = what
        self._throws = throws
        self._thrown = False
        self._rank = current().world.rank
        self._set_state = current().find_set(process_set, "Join")
        planned = len(self._built_in) == len(self._hooks) and not any(each.needs_heartbeat for each in self._built_in)
        self._beats = throws or not planned
        self._heartbeats = 0
        """Heartbeats that this rank has begun."""
        self._contexts = self._set_state.rounds
        self._warned = False
        self._number = number = self._contexts.enter()
        current().fabric.loop.perform(lambda: self._contexts.begin(number))

    def begin(self) -> None:
        """The body begins. Local."""
        for hook in self._built_in:
            hook.context = self
        for hook in self._built_in:
            hook.begin()

    # -- in the body ----------------------------------------------------------------------------

    def notify(self, *, first: bool) -> Handle | None:
        """Note that this rank has inputs; `first`: for the first joinable. Return the heartbeat, if there is one.

        Raises RuntimeError where ranks end together and one has no inputs, JoinError where another rank has failed.
        """
        if not self._beats:
            # A planned reduction finds a failed rank by itself, in the same step on every rank.
            return None
        self._contexts.check()
        if self._thrown:
            raise early_termination()
        if not first:
            return None
        handle = self._heartbeat(active=True)
        if self._throws and _sum(handle) < self._set_state.group.size:
            self._thrown = True
            raise early_termination()
        return handle

    @property
    def _next_heartbeat(self) -> RequestKey:
        """Key of the heartbeat that begins next. Each has its own name: it may begin before the last one has ended."""
        return ("allreduce", f"Join.{self._number}.heartbeat.{self._heartbeats + 1}")

    def _heartbeat(self, *, active: bool) -> Handle:
        """Begin a heartbeat: its sum is the number of ranks with inputs. Collective over the set."""
        _, name = self._next_heartbeat
        self._heartbeats += 1
        mine = torch.tensor([float(active)], device="cpu")
        return allreduce_async(mine, name=name, op=ReduceOp.SUM, process_set=self.process_set)

    # -- after the body -------------------------------------------------------------------------

    def finish(self) -> None:
        """Take part in iterations of other ranks until none has inputs, then run the hooks. Collective; blocks."""
        if self._thrown:
            raise early_termination()
        for hook in self._built_in:
            hook.leave()
        self._contexts.check()
        if self._throws:
            if _sum(self._heartbeat(active=False)):
                self._thrown = True
                raise InputsExhaustedError(f"Rank {self._rank} exhausted all inputs.")
            missed, last = 0, self._rank
        else:
            missed, last = self._stand_in()
        is_last_joiner = not missed
        mine = torch.tensor([self._rank if is_last_joiner else -1, int(not is_last_joiner)], device="cpu")
        agreement = f"Join.{self._number}.agreement"
        agreed = allreduce_async(mine, name=agreement, op=ReduceOp.MAX, process_set=self.process_set).result()
        authority, absent = agreed.tolist()
        # Where every rank has missed an iteration, the one that joined last counts.
        self.authority = authority if authority >= 0 else last
        self.absent = bool(absent)
        for each in self._hooks:
            each.post_hook(is_last_joiner)

    def _stand_in(self) -> tuple[int, int]:
        """Return how many iterations this rank has missed, and the rank that joined last."""
        set_state = self._set_state
        marks = set_state.proxies.marks()
        everything = not self._beats
        set_away(set_state, everything)
        try:
            scope = JoinScope.EVERYTHING if everything else JoinScope.PLANS
            handle = begin_join(set_state, marks, scope, f"left its Join context of {self._what}")
            missed = self._run_main_hooks() if self._beats else 0
            end: JoinEnd = self._wait_beside_proxies(JOIN_KEY, handle).result()
            end_join([set_state], [end])
        finally:
            set_away(set_state, False)
        return max(missed, set_state.proxies.missed), end.last

    def _run_main_hooks(self) -> int:
        """Run the main hooks while any rank has inputs; return how often."""
        missed = 0
        while _sum(self._wait_beside_proxies(self._next_heartbeat, self._heartbeat(active=False))):
            for hook in self._hooks:
                hook.main_hook()
            missed += 1
            self._warn(missed)
        return missed

    def _wait_beside_proxies(self, key: RequestKey, handle: Handle) -> Handle:
        """Wait for the operation `key`, while this rank's proxies take part in planned steps, in the loop.

        Raises the error of a proxy, as other ranks would wait for this one.
        """
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

    # -- the end --------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Leave together with all other ranks; `error` is what this rank raises. Collective over the set; blocks.

        Raises JoinError where another rank has failed and this one has not.
        """
        controller = self._set_state.controller
        if error is not None and not isinstance(error, JoinError) and not self._thrown:
            failure = JoinFailure(self._describe(error), self._set_state.proxies.steps())
            controller.report_failure(self._number, failure)
        failed = error is not None
        try:
            handle = self._start_leaving(failed=failed)
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
                    hook.abandon()
                # Breaks the reference cycle.
                del hook.context
        if error is None and end.error is not None:
            raise JoinError(str(end.error))

    def _start_leaving(self, *, failed: bool) -> Handle:
        set_state = self._set_state
        request = LeaveRequest(set_state.controller.names.counts(), set_state.proxies.spare_queues(), failed)
        ends: list[LeaveEnd] = []

        def job(end: LeaveEnd) -> Job:
            def run(backend: Backend) -> Coroutine[None]:
                # In the queue like any other operation: queues that were being opened are open then.
                self._contexts.end(end)
                ends.append(end)
                yield from ()

            return run

        signature = RequestSpec("join", detail=request)
        return submit(set_state, signature, LEAVE_KEY[1], [], lambda request: ends[0], job=job)

    def _describe(self, error: BaseException) -> JoinError:
        text = f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(".")
        return JoinError(
            f"Rank {self._rank} has left the Join context of {self._what} by {text}. All ranks have left it with that. "
            "They may have made different numbers of steps: give them one rank's parameters before they go on."
        )


def _sum(handle: Handle) -> int:
    """Return how many ranks have inputs. Blocks until the heartbeat has ended."""
    return int(handle.result().item())


def early_termination() -> RuntimeError:
    """The error of ranks with inputs where all end with the first one that has none."""
    return RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
