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


class Heartbeat:
    """The heartbeats of one context."""

    def __init__(self, number: int, process_set: ProcessSet | None) -> None:
        """number: of the context, the same on all ranks."""
        self._name = f"Join.{number}"
        self._process_set = process_set
        self.count = 0
        """Heartbeats that this rank has begun."""

    def beat(self, *, active: bool) -> Handle:
        """Begin a heartbeat: the sum over the ranks is how many have inputs. Collective over the set."""
        number = torch.tensor([float(active)], device="cpu")
        # As the heartbeat of the next iteration may begin before this one has ended, each has a name of its own.
        _, name = self.key
        self.count += 1
        return allreduce_async(number, name=name, op=ReduceOp.SUM, process_set=self._process_set)

    @property
    def key(self) -> RequestKey:
        """What identifies the heartbeat that begins next."""
        return ("allreduce", f"{self._name}.heartbeat.{self.count + 1}")

    def agree(self, values: list[int]) -> list[int]:
        """Return the highest of each value over the ranks. Collective over the set; blocks."""
        name = f"{self._name}.agreement"
        handle = allreduce_async(
            torch.tensor(values, device="cpu"), name=name, op=ReduceOp.MAX, process_set=self._process_set
        )
        highest: list[int] = handle.result().tolist()
        return highest


def active_ranks(handle: Handle) -> int:
    """How many ranks have inputs. Blocks until the heartbeat has ended."""
    return int(handle.result().item())


WARN_THRESHOLD = 1000
"""Iterations that a rank may miss without a warning."""


class JoinContext:
    """What a rank does and learns in a context; seen by the hooks of what hvlike brings itself."""

    def __init__(self, hooks: Sequence[JoinHook], process_set: ProcessSet | None, what: str, *, throws: bool) -> None:
        """Local. what: the joinables, for errors. throws: all ranks end when the first one has no inputs."""
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
        self._membership = current().set_state(process_set, "Join")
        rides = len(self._built_in) == len(self._hooks) and all(each.rides for each in self._built_in)
        self._beats = throws or not rides
        self._rounds = self._membership.rounds
        self._warned = False
        self._number = number = self._rounds.enter()
        current().fabric.loop.perform(lambda: self._rounds.begin(number))
        self._heartbeat = Heartbeat(number, process_set)

    @property
    def missed(self) -> int:
        """How many iterations this rank has missed."""
        return self._membership.proxies.missed

    def begin(self) -> None:
        """The body begins. Local."""
        for hook in self._built_in:
            hook.context = self
        for hook in self._built_in:
            hook.begin()

    # -- in the body ----------------------------------------------------------------------------

    def notify(self, *, first: bool) -> Handle | None:
        """This rank has inputs. first: on behalf of the first joinable. Returns the heartbeat, if there is one.

        Raises: RuntimeError where ranks shall end together and one has no inputs; JoinError.
        """
        if not self._beats:
            # What is planned finds out by itself that a rank has failed, in the same step on every rank.
            return None
        self._rounds.check()
        if self._thrown:
            raise early_termination()
        if not first:
            return None
        handle = self._heartbeat.beat(active=True)
        if self._throws and active_ranks(handle) < self._membership.group.size:
            self._thrown = True
            raise early_termination()
        return handle

    # -- after the body -------------------------------------------------------------------------

    def finish(self) -> None:
        """The body has ended well: stand in for the others until all have no inputs, and run the hooks.

        Collective over the set; blocks.
        """
        if self._thrown:
            raise early_termination()
        for hook in self._built_in:
            hook.leave()
        self._rounds.check()
        if self._throws:
            if active_ranks(self._heartbeat.beat(active=False)):
                self._thrown = True
                raise InputsExhaustedError(f"Rank {self._rank} exhausted all inputs.")
            shadowed, last = 0, self._rank
        else:
            shadowed, last = self._stand_in()
        is_last_joiner = not shadowed
        authority, absent = self._heartbeat.agree([self._rank if is_last_joiner else -1, int(not is_last_joiner)])
        # Where every rank has missed something, nobody has seen all: then it is the one that joined last.
        self.authority = authority if authority >= 0 else last
        self.absent = bool(absent)
        for each in self._hooks:
            each.post_hook(is_last_joiner)

    def _stand_in(self) -> tuple[int, int]:
        """Return how many iterations this rank has missed, and who joined last."""
        set_state = self._membership
        marks = set_state.proxies.marks()
        everything = not self._beats
        set_away(set_state, everything)
        try:
            scope = JoinScope.EVERYTHING if everything else JoinScope.PLANS
            handle = begin_join(set_state, marks, scope, f"left its Join context of {self._what}")
            shadowed = self._shadow_heartbeats() if self._beats else 0
            end: JoinEnd = self._wait_beside_shadows(JOIN_KEY, handle).result()
            end_join([set_state], [end])
        finally:
            set_away(set_state, False)
        return max(shadowed, set_state.proxies.missed), end.last

    def _shadow_heartbeats(self) -> int:
        """Run the main hooks while any rank has inputs; returns how often."""
        shadowed = 0
        while active_ranks(self._wait_beside_shadows(self._heartbeat.key, self._heartbeat.beat(active=False))):
            for hook in self._hooks:
                hook.main_hook()
            shadowed += 1
            self._warn(shadowed)
        return shadowed

    def _wait_beside_shadows(self, key: RequestKey, handle: Handle) -> Handle:
        """Wait for the operation `key`; what this rank stands in for meanwhile runs in the loop.

        Raises: what has gone wrong there: the others would wait for this rank.
        """
        proxies = self._membership.proxies

        def worth_a_look() -> bool:
            warn = proxies.missed > WARN_THRESHOLD and not self._warned
            return handle.done() or warn or proxies.error() is not None

        while not handle.done():
            self._membership.controller.wait(key, worth_a_look, None)
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
        """Leave together with all other ranks; `error`: what this rank leaves by. Collective over the set; blocks.

        Raises: JoinError where another rank has failed, and this one has not.
        """
        controller = self._membership.controller
        if error is not None and not isinstance(error, JoinError) and not self._thrown:
            failure = JoinFailure(self._describe(error), self._membership.proxies.steps())
            controller.report_failure(self._number, failure)
        failed = error is not None
        try:
            handle = self._start_leaving(failed=failed)
            if error is not None and not isinstance(error, (Exception, KeyboardInterrupt)):
                # The program ends: it shall not wait for anybody.
                return
            end: LeaveEnd = handle.result()
            failed = end.failed
        except HorovodInternalError:
            failed = True
            current().fabric.loop.perform(lambda: self._rounds.end(None))
            if error is None:
                raise
            return
        finally:
            # Not before the lanes of what was half done are lost: the steps may still run there.
            for hook in self._built_in:
                if failed:
                    hook.abandon()
                # The context knows the hook, too.
                del hook.context
        if error is None and end.error is not None:
            raise JoinError(str(end.error))

    def _start_leaving(self, *, failed: bool) -> Handle:
        set_state = self._membership
        request = LeaveRequest(set_state.controller.names.counts(), set_state.proxies.spare_lanes(), failed)
        ends: list[LeaveEnd] = []

        def job(end: LeaveEnd) -> Job:
            def run(plane: Backend) -> Coroutine[None]:
                # On the lane like any other operation: lanes that were being opened are open then.
                self._rounds.end(end)
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


def early_termination() -> RuntimeError:
    """What ranks with inputs raise where all shall end with the first one that has none."""
    return RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
