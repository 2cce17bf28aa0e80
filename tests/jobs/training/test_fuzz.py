"""A few of the random training programs that scripts/fuzz runs by the thousand.

They end equal to one process, or in an error that the pages describe.
Half of them with HVLIKE_OVERLAP=1, the way that ranks with cores to spare take.
"""

import pytest
from support.fuzz.jobs import Job
from support.fuzz.programs import KINDS, Setting
from support.fuzz.run import Runner

PROGRAMS = 16
SEED = 20


@pytest.mark.in_turn(2, of=5)
@pytest.mark.parametrize(("ranks", "nodes"), [(2, None), (3, 2)])
def test_random_programs(ranks: int, nodes: int | None) -> None:
    with Job(ranks) as job:
        runner = Runner(job, shrinking_seconds=15.0)
        for place, kind in enumerate(KINDS):
            for overlap in (False, True):
                found = runner.block(kind, SEED + place, Setting(ranks, overlap, nodes), PROGRAMS)
                assert found is None, str(found)
    assert runner.tried >= len(KINDS) * PROGRAMS
