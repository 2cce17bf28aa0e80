"""All that the rungs judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hvlike.doctor.facts.model import Model
from hvlike.doctor.facts.programs import Programs, Trial
from hvlike.doctor.facts.rank import RankFacts
from hvlike.doctor.job import Job
from hvlike.doctor.probe import Gap

T = TypeVar("T")


class Unanswered(Exception):
    """A rung needs what could not be found out."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(gap.reason)
        self.gap = gap


def known(value: T | Gap) -> T:
    """The answer. Raises: Unanswered when there is none; the ladder then says why."""
    if isinstance(value, Gap):
        raise Unanswered(value)
    return value


@dataclass(frozen=True)
class Case:
    """What was found out, on one rank alone or on all."""

    ranks: tuple[RankFacts, ...]
    """Of all ranks where they came together, else of this one."""
    job: Job
    programs: Programs | Gap | None
    """None: not looked at."""
    trial: Trial | Gap | None
    """None: not tried."""
    model: Model | Gap | None
    """None: the user named none."""

    @property
    def me(self) -> RankFacts:
        """The first of the ranks."""
        return self.ranks[0]

    @property
    def unmet(self) -> int:
        """How many ranks the launcher was asked for, where they did not come together; else 0."""
        launcher = self.me.surroundings.launcher
        asked = 0 if launcher is None else launcher.size
        return asked if asked > len(self.ranks) else 0

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node; this rank alone where they did not come together."""
        meeting = self.job.meeting
        return ((0,),) if meeting is None or isinstance(meeting, Gap) else meeting.nodes
