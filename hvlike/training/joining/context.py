"""One Join context on one rank, from the first line of its body until all ranks have left it."""

from __future__ import annotations

from collections.abc import Sequence

from hvlike.collectives.context import current
from hvlike.collectives.handles import Handle
from hvlike.collectives.joining import JOIN_KEY, LEAVE_KEY, Failure, JoinEnd, LeaveEnd, LeaveRequest, Scope
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.request import Key, Signature
from hvlike.collectives.standing_in import begin_standing_in, set_away, settle
from hvlike.collectives.submission import submit
from hvlike.errors import HorovodInternalError, InputsExhaustedError, JoinError
from hvlike.planes.lane import Job
from hvlike.planes.plane import Plane
from hvlike.training.joining.heartbeat import Heartbeat, active_ranks
from hvlike.training.joining.joinable import BuiltInHook, JoinHook
from hvlike.training.misuse import warn_user
from hvlike.transport.routine import Routine

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
        self._membership = current().membership(process_set, "Join")
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
        return self._membership.shadows.missed

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
        membership = self._membership
        marks = membership.shadows.marks()
        everything = not self._beats
        set_away(membership, everything)
        try:
            scope = Scope.EVERYTHING if everything else Scope.PLANS
            handle = begin_standing_in(membership, marks, scope, f"left its Join context of {self._what}")
            shadowed = self._shadow_heartbeats() if self._beats else 0
            end: JoinEnd = self._wait_beside_shadows(JOIN_KEY, handle).result()
            settle([membership], [end])
        finally:
            set_away(membership, False)
        return max(shadowed, membership.shadows.missed), end.last

    def _shadow_heartbeats(self) -> int:
        """Run the main hooks while any rank has inputs; returns how often."""
        shadowed = 0
        while active_ranks(self._wait_beside_shadows(self._heartbeat.key, self._heartbeat.beat(active=False))):
            for hook in self._hooks:
                hook.main_hook()
            shadowed += 1
            self._warn(shadowed)
        return shadowed

    def _wait_beside_shadows(self, key: Key, handle: Handle) -> Handle:
        """Wait for the operation `key`; what this rank stands in for meanwhile runs in the loop.

        Raises: what has gone wrong there: the others would wait for this rank.
        """
        shadows = self._membership.shadows

        def worth_a_look() -> bool:
            warn = shadows.missed > WARN_THRESHOLD and not self._warned
            return handle.done() or warn or shadows.error() is not None

        while not handle.done():
            self._membership.negotiator.wait(key, worth_a_look, None)
            self._warn(shadows.missed)
            error = shadows.error()
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
        negotiator = self._membership.negotiator
        if error is not None and not isinstance(error, JoinError) and not self._thrown:
            failure = Failure(self._describe(error), self._membership.shadows.steps())
            negotiator.report_failure(self._number, failure)
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
        membership = self._membership
        request = LeaveRequest(membership.negotiator.names.counts(), membership.shadows.spare_lanes(), failed)
        ends: list[LeaveEnd] = []

        def job(end: LeaveEnd) -> Job:
            def run(plane: Plane) -> Routine[None]:
                # On the lane like any other operation: lanes that were being opened are open then.
                self._rounds.end(end)
                ends.append(end)
                yield from ()

            return run

        signature = Signature("join", detail=request)
        return submit(membership, signature, LEAVE_KEY[1], [], lambda request: ends[0], job=job)

    def _describe(self, error: BaseException) -> JoinError:
        text = f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(".")
        return JoinError(
            f"Rank {self._rank} has left the Join context of {self._what} by {text}. All ranks have left it with that. "
            "They may have made different numbers of steps: give them one rank's parameters before they go on."
        )


def early_termination() -> RuntimeError:
    """What ranks with inputs raise where all shall end with the first one that has none."""
    return RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
