"""Stall reports: who waits, who is missing, and where the missing ranks are.

StatusQuery      asks ranks where they are. A rank answers from its loop, which runs also while the user's program
                 computes. No answer: it has stopped, or is in a call that holds Python's lock
StallInspector   on the coordinator: asks all members when a request is overdue, and reports their answers. Each time
                 it makes an Inspection, which has the answers until the report
PeerProbe        on a member that waits: asks the coordinator, the leader of its node and the other ranks there whether
                 they still answer, for stalls that the coordinator cannot see
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from hvlike.collectives.health.wait_for_graph import STEP, Counts, WaitForGraph
from hvlike.collectives.requests.join_protocol import JOIN_KEY
from hvlike.collectives.requests.message_table import MessageTable, name_ranks
from hvlike.collectives.requests.request import RequestKey
from hvlike.errors import HorovodInternalError, StalledError
from hvlike.observe.log import main_stack
from hvlike.system.system import system
from hvlike.transport.loop.loop import Loop

logger = logging.getLogger("hvlike")

ANSWER_SECONDS = 2.0  # How long ranks have to answer
SHOWN_STACKS = 4  # A report shows the stacks of at most this many ranks
Answer = tuple[float, str]  # When it was asked, by the asker's clock; the main thread's stack, empty inside hvlike


@dataclass(frozen=True)
class StallLimits:
    report_seconds: float | None = 60.0  # After how long a report is made, and how long until the next; None: never
    shutdown_seconds: float = 0.0  # After how long everything in the process set ends with StalledError; 0: never

    @property
    def shortest(self) -> float | None:
        """After how long a wait is worth a question; None: never."""
        limits = (self.report_seconds, self.shutdown_seconds or None)
        return min((each for each in limits if each is not None), default=None)

    def judge(self, text: str, waited: float, overdue: float | None = None) -> StalledError | None:
        """Log a wait that is worth a report; the error past its limit, for which only `overdue` seconds may count."""
        if self.report_seconds is not None and waited >= self.report_seconds:
            logger.warning("%s", text)
        limit = self.shutdown_seconds
        if not limit or (waited if overdue is None else overdue) < limit:
            return None
        return StalledError(f"A wait took more than {limit:g} s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS): {text}")


class StatusQuery:
    def __init__(self, ask: Callable[[int, float], None], look: Callable[[int], str]) -> None:
        """ask: sends the question to a rank, in the loop. look: what can be seen from here of a rank that is silent."""
        self._ask = ask
        self._look = look
        self._ranks: frozenset[int] = frozenset()
        self._answers: dict[int, Answer] = {}
        self.asked = -inf  # When the last question was asked, in seconds of system.monotonic()

    def prepare(self, ranks: Iterable[int]) -> None:
        """A new question to these ranks; `send` asks it. Any thread."""
        self._ranks = frozenset(ranks)
        self.asked = system.monotonic()

    def send(self) -> None:
        for rank in self._ranks:
            self._ask(rank, self.asked)

    def hear(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer

    def heard_at(self, rank: int) -> float:
        return self._answers.get(rank, (-inf, ""))[0]

    def silent(self) -> list[int]:
        return sorted(rank for rank in self._ranks if self.heard_at(rank) != self.asked)

    def describe(self, ranks: Collection[int]) -> list[str]:
        """A line for each of these ranks, with the stack of its main thread where it is not in hvlike."""
        return [self._line(rank) for rank in sorted(ranks)[:SHOWN_STACKS]]

    def _line(self, rank: int) -> str:
        asked, stack = self._answers.get(rank, (-inf, ""))
        if asked != self.asked:
            return describe_silent(rank, self._look(rank))
        return f"  rank {rank} is at\n{stack}" if stack else f"  rank {rank} waits inside hvlike"


def describe_silent(rank: int, seen: str) -> str:
    """The line of a rank that does not answer. seen: what can be seen of it from here."""
    return f"  rank {rank} does not answer; {seen}".removesuffix("; ")


def answer_of(asked: float) -> Answer:
    return asked, main_stack()


HEAD = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for "
    "remainder of ranks for more than {seconds:.0f} seconds. Every rank has to call the same operations; look for a "
    "rank that is busy, takes another branch, or has less data (see hvd.join())."
)


@dataclass(frozen=True)
class Submission:
    key: RequestKey
    place: str
    seconds: float
    detail: str = ""  # Shapes and dtypes, or the parameters of a bucket

    def __str__(self) -> str:
        return f"{self.key[0]} {self.key[1]!r} at {self.place}, {self.seconds:.0f} s ago"


@dataclass(frozen=True)
class StatusReply:
    number: int
    unfinished: Mapping[RequestKey, Submission]
    last: Submission | None  # What it has asked for last, finished or not
    steps: Counts  # Steps of each planned reduction it has entered
    stack: str = ""  # Where its main thread is, while that does not wait in hvlike


@dataclass
class StallInspector:
    ranks: tuple[int, ...]
    ask: Callable[[int], None]
    limits: StallLimits
    look: Callable[[int], str] = lambda rank: ""  # What can be seen from here of a rank that does not answer
    _number: int = 0
    _next_report: float = 0.0
    _inspection: Inspection | None = None  # Under way

    def watch(self, table: MessageTable, waits: WaitForGraph) -> HorovodInternalError | None:
        """Begin an inspection where something is overdue, or end one; return the error of a wait past its limit."""
        now, shortest = system.monotonic(), self.limits.shortest
        if shortest is None:
            return None
        overdue = find_overdue(table, waits, now, shortest)
        if self._inspection is None:
            if overdue and now >= self._next_report:
                self._number += 1
                self._inspection = Inspection(self.ranks, self._number, now + ANSWER_SECONDS, self.look)
                self.ask(self._number)
            return None
        if not self._inspection.is_over(now):
            return None
        inspection, self._inspection = self._inspection, None
        self._next_report = now + shortest
        if JOIN_KEY in overdue:
            # A wait in join() takes as long as the others have data: what counts is how long they rest.
            overdue[JOIN_KEY] = inspection.rest(table.missing(JOIN_KEY))
            if overdue[JOIN_KEY] < shortest:
                del overdue[JOIN_KEY]
        return self._report(overdue, inspection, table, waits)

    def hear(self, position: int, answer: StatusReply) -> None:
        if self._inspection is not None and answer.number == self._inspection.number:
            self._inspection.answers[position] = answer

    def _report(
        self, overdue: Mapping[RequestKey, float], inspection: Inspection, table: MessageTable, waits: WaitForGraph
    ) -> HorovodInternalError | None:
        """Log what clearly waits for ranks; return the error of a wait past its limit."""
        lines: list[str] = []
        absent: set[int] = set()
        longest = 0.0
        for key, age in overdue.items():
            waiting, missing = inspection.sides(key, table, waits)
            if waiting and missing:
                lines.append(inspection.describe(key, waiting, missing))
                absent.update(missing)
                longest = max(longest, age)
        if not lines:
            return None
        report, shutdown = self.limits.report_seconds, self.limits.shutdown_seconds
        text = "\n".join([*lines, *inspection.stacks(sorted(absent))])
        if report is not None and longest >= report:
            logger.warning("%s\n%s", HEAD.format(seconds=report), text)
        if shutdown and longest >= shutdown:
            return StalledError(
                "hvlike: Horovod has been shut down: operations have waited for other ranks for more than "
                f"{shutdown:g} s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS).\n{text}"
            )
        return None


@dataclass
class Inspection:
    """One question to all members where they are, and what they have answered so far, by position."""

    ranks: tuple[int, ...]
    number: int
    deadline: float
    look: Callable[[int], str]
    answers: dict[int, StatusReply] = field(default_factory=dict)

    def is_over(self, now: float) -> bool:
        return len(self.answers) == len(self.ranks) or now >= self.deadline

    def sides(self, key: RequestKey, table: MessageTable, waits: WaitForGraph) -> tuple[list[int], list[int]]:
        """Return who waits in an operation, and for whom; nobody where that is not clear."""
        if key[0] == STEP:
            return [each for each, wait in waits.waits.items() if wait.key == key], self._behind(key[1], table)
        # A leader that does not answer keeps back what its node has asked for.
        asked = {each for each, answer in self.answers.items() if key in answer.unfinished}
        waiting = sorted(asked.union(table.pending.get(key, ())))
        return waiting, [each for each in map(self.ranks.index, table.missing(key)) if each not in waiting]

    def describe(self, key: RequestKey, waiting: Sequence[int], missing: Sequence[int]) -> str:
        """Return the lines of one operation in a report."""
        known = [self.answers[each].unfinished.get(key) for each in waiting if each in self.answers]
        detail = next((each.detail for each in known if each is not None), "")
        where = ", ".join(self._where(position, key) for position in waiting)
        last = "; ".join(self._last_of(position) for position in missing)
        return f"{key[0]} {key[1]!r}{detail}\n  waits on {where}\n  missing: {last}"

    def rest(self, ranks: Iterable[int]) -> float:
        """For how long none of these has asked for anything; those that do not answer do not count."""
        answers = [self.answers.get(self.ranks.index(rank)) for rank in ranks]
        return min((each.last.seconds for each in answers if each is not None and each.last is not None), default=inf)

    def stacks(self, positions: Sequence[int]) -> Iterable[str]:
        """Where the members at these positions are, a line for each and its stack; the first few of them."""
        for position in positions[:SHOWN_STACKS]:
            answer = self.answers.get(position)
            rank = self.ranks[position]
            if answer is None:
                seen = self.look(rank)
                if seen:
                    yield describe_silent(rank, seen)
            elif answer.stack:
                yield f"  rank {rank} is at\n{answer.stack}"

    def _behind(self, name: str, table: MessageTable) -> list[int]:
        """Who has not entered the step that others are in, as far as they have answered."""
        steps = {position: answer.steps.get(name, 0) for position, answer in self.answers.items()}
        most = max(steps.values(), default=0)
        silent = [each for each in range(len(self.ranks)) if each not in steps]
        return [
            each
            for each in sorted([*silent, *(position for position, step in steps.items() if step < most)])
            if each not in table.away
        ]

    def _where(self, position: int, key: RequestKey) -> str:
        answer = self.answers.get(position)
        submission = answer.unfinished.get(key) if answer is not None else None
        rank = f"rank {self.ranks[position]}"
        return rank if submission is None else f"{rank} ({submission.place}, since {submission.seconds:.0f} s)"

    def _last_of(self, position: int) -> str:
        answer = self.answers.get(position)
        rank = name_ranks([self.ranks[position]])
        if answer is None:
            return f"{rank}, which does not answer (stopped, or busy in a call that holds Python's lock)"
        if answer.last is None:
            return f"{rank}, which has submitted nothing yet"
        return f"{rank}, which submitted last {answer.last}"


def find_overdue(table: MessageTable, waits: WaitForGraph, now: float, seconds: float) -> dict[RequestKey, float]:
    """What has waited for others longer than `seconds`, and how long: requests not all have made, planned steps."""
    ages = {key: now - since for key, since in table.since.items()}
    for wait in waits.waits.values():
        if wait.key[0] == STEP:
            ages[wait.key] = max(ages.get(wait.key, 0.0), now - wait.since)
    return {key: age for key, age in ages.items() if age >= seconds}


def describe_tensors(shapes: Iterable[tuple[int, ...]], dtypes: Iterable[str]) -> str:
    """A request's tensors, the first few of them: ": float32 [3, 4], int64 []"."""
    listed = [f"{dtype} {list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    shown = ", ".join(listed[:4]) + (f", ... ({len(listed)} in all)" if len(listed) > 4 else "")
    return f": {shown}" if listed else ""


PING, PONG = "ping", "pong"


@dataclass
class PeerProbe:
    loop: Loop
    rank: int
    coordinator: int
    leader: int  # Through which this rank speaks to the coordinator; that itself on its node
    neighbours: Collection[int]  # The members on this node
    send: Callable[[int, str, float], None]
    look: Callable[[int], str]  # What can be seen from here of a rank that does not answer
    limits: StallLimits

    def __post_init__(self) -> None:
        self._query = StatusQuery(lambda each, asked: self.send(each, PING, asked), self.look)
        self.hear = self._query.hear

    def check(self, key: RequestKey, waited: float, agreed: bool, done: Callable[[], bool]) -> StalledError | None:
        """Ask who is silent and report it; the error past the limit. agreed: only the data are missing."""
        query = self._query
        ranks = {self.coordinator, self.leader, *(self.neighbours if agreed else ())} - {self.rank}
        query.prepare(ranks)
        self.loop.post(query.send, wake=False)
        self.loop.wait(lambda: done() or not query.silent(), ANSWER_SECONDS)
        silent = query.silent()
        if done() or not (agreed or silent):
            return None
        stuck = self.leader if self.coordinator not in silent else self.coordinator
        text = "\n".join([self._describe(key, waited, agreed, stuck), *query.describe(ranks if agreed else silent)])
        # A coordinator that was only busy has answered before: the wait may be a long one for good reasons.
        overdue = waited if agreed else min(waited, query.asked - query.heard_at(stuck))
        return self.limits.judge(text, waited, overdue)

    def _describe(self, key: RequestKey, waited: float, agreed: bool, stuck: int) -> str:
        waits = f"rank {self.rank} has waited for {waited:.0f} s in {key[0]} {key[1]!r}"
        if agreed:
            return (
                f"{waits}, for the data: all ranks have asked for it, but a rank has stopped in the middle of it, or "
                "the network is down or very slow."
            )
        role = "which coordinates" if stuck == self.coordinator else "through which this node asks"
        return (
            f"{waits}, and nobody can say for which rank: rank {stuck}, {role}, is stuck inside hvlike or in a call "
            "that holds Python's lock."
        )
