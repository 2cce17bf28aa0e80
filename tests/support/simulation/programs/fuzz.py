"""The random training programs of scripts/fuzz in simulated jobs: the same oracle, under any schedule."""

from __future__ import annotations

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from support.fuzz.hvlike_world import HvlikeWorld
from support.fuzz.judge import is_sound, judge
from support.fuzz.oracle import simulate
from support.fuzz.outcomes import Outcome
from support.fuzz.programs import KINDS, Program, Setting
from support.fuzz.strategies import programs
from support.fuzz.training import Training
from support.simulation.machine.job import JobEnd

DRAWN = 8  # Of so many programs of one seed the last one is taken: the first are the simplest


@dataclass
class Fuzz:
    """One program."""

    program: Program
    setting: Setting
    expected: list[Outcome] = field(repr=False)
    found: dict[int, Outcome] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def draw(cls, seed: int, size: int) -> Fuzz:
        """Draw one that the oracle can judge."""
        draw = random.Random(seed)
        setting = Setting(size, draw.random() < 0.5)
        drawn: list[Program] = []
        with ThreadPoolExecutor(size) as pool:

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=DRAWN,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.given(programs(draw.choice(KINDS), size))
            def take(program: Program) -> None:
                drawn.append(program)

            take()
            for program in reversed(drawn):
                expected = simulate(program, size, pool)
                if is_sound(expected):
                    return cls(program, setting, expected)
            # The plain training can always be judged.
            plain = Program("optimizer", ("linear",))
            return cls(plain, setting, simulate(plain, size, pool))

    def options(self) -> dict[str, Any]:
        """What `simulate` is to be given."""
        return {"environment": {"HVLIKE_OVERLAP": "1"} if self.setting.overlap else {}}

    def __call__(self, hvd: Any, rank: int) -> None:
        hvd.init()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.found[rank] = Training(HvlikeWorld(), self.program).run()
        hvd.shutdown()

    def judge(self, end: JobEnd) -> str | None:
        """Why the job has not ended as it should; None if it has."""
        if end.hang is not None:
            return f"it hangs: {end.hang}"
        for rank, outcome in enumerate(end.ranks):
            if outcome.error is not None:
                return f"rank {rank}: {outcome.trace}"
        if end.died:
            return "an error has ended a thread: " + "\n".join(end.died)
        # What is sent between nodes is rounded once more.
        setting = replace(self.setting, ranks_per_node=1 if end.nodes > 1 else None)
        found = [self.found[rank] for rank in range(setting.ranks)]
        with ThreadPoolExecutor(setting.ranks) as pool:
            return judge(self.program, setting, found, self.expected, partial(simulate, ranks=setting.ranks, pool=pool))
