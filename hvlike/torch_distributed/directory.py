"""Where the members of a group are: how many calls each has made in it, and what it does now.

Members ask each other for their reports and errors. To the search for deadlocks each rank tells all of its groups, as
ranks that wait for each other may do so in different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from hvlike.collectives.health.stall_inspector import ANSWER_SECONDS, SHOWN_STACKS
from hvlike.collectives.requests.message_table import name_ranks
from hvlike.collectives.session.context import Context
from hvlike.errors import HorovodInternalError
from hvlike.observe.log import main_stack
from hvlike.system.system import of_process, system
from hvlike.transport.loop.coroutine import Coroutine, Wait
from hvlike.transport.messages.traffic import Topic

if TYPE_CHECKING:
    from hvlike.torch_distributed.calls import CallQueue
    from hvlike.torch_distributed.watchdog import Watchdog
    from hvlike.torch_distributed.work import Work


class Answer(NamedTuple):
    made: int  # Calls in the group so far; -1: there is no such group
    call: str  # The call that was asked for, as the member has made it
    stack: str  # Of its main thread; empty while that waits inside hvlike


class Directory:
    """The groups of this rank; asks the members of one where they are, and answers that."""

    def __init__(self, context: Context) -> None:
        self.groups: dict[str, CallQueue] = {}
        self._early: dict[str, Callable[[Watchdog], None]] = {}  # What has ended groups that are still to come
        self._fabric = context.fabric
        self._answers: dict[tuple[str, int, int], Answer] = {}  # By group, call and rank
        self._asking = system.Lock()
        self.promises: set[Work] = set()
        """Works with a future that has not ended, or whose callbacks have not: these may make calls."""
        self._fabric.channel.listen(Topic.GROUP_CALLS, lambda rank, message, tensors: self._hear(rank, *message))
        self._fabric.ticks.append(self._watch)
        context.registry.set_states[0].controller.positions.calls = self

    # -- for the search for deadlocks -------------------------------------------------------------

    def made(self) -> Mapping[str, int]:
        return {name: each.watchdog.made for name, each in list(self.groups.items())}

    def may_go_on(self) -> bool:
        return bool(self.promises)

    def stop(self, name: str, error: HorovodInternalError) -> None:
        self._end(name, lambda watchdog: watchdog.stop(error))

    # -- groups of this rank ----------------------------------------------------------------------

    def enter(self, group: CallQueue) -> None:
        """Know a group. Others may have made it earlier, and lost it."""
        self.groups[group.name] = group
        self._fabric.loop.perform(lambda: self._early.pop(group.name, _go_on)(group.watchdog))

    def _end(self, name: str, how: Callable[[Watchdog], None]) -> None:
        """End a group, now or as soon as it is there; no name comes twice. In the loop."""
        group = self.groups.get(name)
        if group is None:
            self._early.setdefault(name, how)
        else:
            how(group.watchdog)

    # -- between members --------------------------------------------------------------------------

    def _watch(self) -> None:
        for each in list(self.groups.values()):
            each.watch()

    def tell(self, group: Watchdog, reason: HorovodInternalError) -> None:
        """Tell all other members why this rank cannot go on in a group."""
        for rank in group.group.ranks:
            if rank != self._fabric.world.rank:
                self._fabric.channel.send(rank, Topic.GROUP_CALLS, (group.name, 0, reason), kind="status")

    def _hear(self, rank: int, name: str, number: int, answer: Answer | HorovodInternalError | None) -> None:
        group = self.groups.get(name)
        if isinstance(answer, HorovodInternalError):
            reason = answer
            self._end(name, lambda watchdog: watchdog.follow(rank, reason))
            return
        if answer is not None:
            self._answers[name, number, rank] = answer
            return
        answer = Answer(-1, "", main_stack())
        if group is not None:
            answer = Answer(group.watchdog.made, group.watchdog.describe(number), main_stack())
        self._fabric.channel.send(rank, Topic.GROUP_CALLS, (name, number, answer), kind="status")

    def ask(self, group: Watchdog, work: Work) -> Coroutine[Mapping[int, Answer | None]]:
        """Ask all other members about a call; None for those that do not answer in time. A call that ends ends this."""
        fabric = self._fabric
        others = [rank for rank in group.group.ranks if rank != fabric.world.rank]
        for rank in others:
            self._answers.pop((group.name, work.number, rank), None)
            fabric.channel.send(rank, Topic.GROUP_CALLS, (group.name, work.number, None), kind="status")
        until, had_ended = system.monotonic() + ANSWER_SECONDS, work.ended
        while system.monotonic() < until and work.ended == had_ended:
            if all((group.name, work.number, each) in self._answers for each in others):
                break
            yield Wait.NOTIFY
        return {rank: self._answers.pop((group.name, work.number, rank), None) for rank in others}

    def ask_all(self, group: Watchdog, work: Work) -> Mapping[int, Answer | None]:
        """The same for a thread that waits. Blocks for a moment."""
        loop = self._fabric.loop
        # Answers of one question would be taken for those of another.
        with self._asking:
            task = loop.start(self.ask(group, work), wake=False)
            loop.wait(lambda: task.done, 2 * ANSWER_SECONDS)
            return task.result or {}


def _go_on(watchdog: Watchdog) -> None:
    pass


def describe_missing(answers: Mapping[int, Answer | None], number: int) -> str:
    """Who has not made call `number` of a group, from what each member has answered."""
    silent = [rank for rank, answer in answers.items() if answer is None]
    behind = {rank: answer for rank, answer in answers.items() if answer is not None and answer.made < number}
    lines = []
    if behind:
        lines.append(f"Missing: {name_ranks(behind)}.")
    if silent:
        lines.append(f"No answer from {name_ranks(silent)} (stopped, or busy in a call that holds Python's lock).")
    for rank, answer in list(behind.items())[:SHOWN_STACKS]:
        state = f"has made {answer.made} calls in it" if answer.made >= 0 else "has not made this group"
        where = f" and is at\n{answer.stack}\n" if answer.stack else " and waits inside hvlike."
        lines.append(f"Rank {rank} {state}{where}")
    if not lines:
        lines.append(f"All have made this call, but the data do not arrive; it is {describe_calls(answers)}.")
    return " ".join(lines)


def describe_calls(answers: Mapping[int, Answer | None]) -> str:
    """What each member that has answered has called, for an error."""
    return ", ".join(f"rank {rank} {answer.call}" for rank, answer in answers.items() if answer and answer.call)


class _Directories:
    def __init__(self) -> None:
        self.known: dict[Context, Directory] = {}


_directories = of_process(_Directories)


def directory_of(context: Context) -> Directory:
    known = _directories.known
    if context not in known:
        known.clear()
        known[context] = Directory(context)
    return known[context]
