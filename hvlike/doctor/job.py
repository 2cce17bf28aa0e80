"""Starting the job step by step, as init() and a first reduction do; the records show how far it came."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hvlike
from hvlike.collectives.context import current
from hvlike.config import KNOBS
from hvlike.doctor import timing
from hvlike.doctor.facts.rank import RankFacts
from hvlike.doctor.facts.shared_memory import mapped_by_hvlike
from hvlike.doctor.probe import Answers, Gap, Prober
from hvlike.doctor.timing import Timings
from hvlike.transport.roll_call import Place, RollCall

_TIMING_LIMITS = 3.0


@dataclass(frozen=True)
class Meeting:
    """What rank 0 has heard of all ranks; the tuples are empty elsewhere."""

    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankFacts, ...]
    places: tuple[Place, ...]
    wall_times: tuple[float, ...]
    """Of all ranks at the same moment."""


@dataclass(frozen=True)
class Running:
    """hvlike after init()."""

    shares: tuple[str | None, ...]
    """How each rank shares memory with those of its node: "memfd", "/dev/shm", or None where it is alone."""


@dataclass(frozen=True)
class Job:
    """How far the job came. A Gap: there it ended. None: not reached."""

    place: Place | Gap
    meeting: Meeting | Gap | None
    running: Running | Gap | None
    timings: Timings | Gap | None
    end: Gap | None
    """What went wrong at the very end."""


def start(own: RankFacts, prober: Prober) -> Job:
    """Start MPI and hvlike in a child, and reduce something. Collective: every rank of the job; blocks."""
    patience = {3: _TIMING_LIMITS}
    return read(prober.follow(lambda: _steps(own), lambda number: prober.limit * patience.get(number, 1.0)))


def read(answers: Answers[Any]) -> Job:
    """The records in their order, as a job."""
    place, meeting, running, timings, end = [*answers.records, answers.gap, None, None, None, None][:5]
    return Job(place, meeting, running, timings, end)


def _steps(own: RankFacts) -> Iterator[Any]:
    for name in KNOBS["timeline"].spellings:
        # A timeline of the user's is not to be written over.
        os.environ.pop(name, None)
    roll_call = RollCall()
    yield roll_call.place
    nodes = roll_call.meet()
    ranks = roll_call.gather(own) or []
    places = roll_call.gather(roll_call.place) or []
    wall_times = roll_call.gather(roll_call.wall_time()) or []
    yield Meeting(nodes, tuple(ranks), tuple(places), tuple(wall_times))
    hvlike.init()
    plan = timing.ways(current().world.nodes)
    sets = timing.add_process_sets(plan)
    mine = mapped_by_hvlike() if hvlike.local_size() > 1 else None
    yield Running(tuple(hvlike.allgather_object(mine)))
    yield timing.measure(plan, sets, timing.own_gpu())
    hvlike.shutdown()
    roll_call.end()
