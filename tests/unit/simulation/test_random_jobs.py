"""Random programs on simulated ranks end as they should; `scripts/simulate` runs them by the thousand."""

import pytest
from support.fuzz.planted import Plant
from support.simulation.planted import PLANTS, RARE
from support.simulation.programs.autograd import Autograd
from support.simulation.programs.kinds import KINDS
from support.simulation.programs.torch_groups import COLLECTIVES, Torch
from support.simulation.run import Draw, what_differs, what_is_wrong


@pytest.mark.parametrize("kind", KINDS)
def test_random_jobs(kind: str) -> None:
    for seed in range(10):
        job = Draw.of(seed, [kind], range(2, 5), range(1, 4))
        wrong = what_is_wrong(job.run(), job)
        assert wrong is None, f"{job}\n{wrong}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_the_same_job_every_time(kind: str) -> None:
    stories = [Draw.of(3, [kind], range(2, 4), range(1, 4)).run(trace=True).story for _ in range(2)]
    assert what_differs(*stories) is None
    assert len(stories[0]) > 2


@pytest.mark.parametrize("fault", PLANTS + RARE, ids=lambda fault: fault.name)
def test_the_planted_faults_still_have_a_place(fault: Plant) -> None:
    assert not fault.missing()


def test_all_modes_and_optimizers_of_autograd_are_drawn() -> None:
    programs = [Autograd.draw(seed, 3) for seed in range(30)]
    graphs = [each for program in programs for mine in program.graphs for each in mine]
    assert {each.mode for each in graphs} == {"safe", "smart", "fast"}
    assert any(program.two_threads and len(program.graphs[0]) == 2 for program in programs)
    assert any(len(program.paths) == 2 for program in programs)


def test_all_operations_of_torch_are_drawn() -> None:
    operations = [
        each for seed in range(60) for run in Torch.draw(seed, 3).runs for made in run.rounds for each in made
    ]
    assert {each.what for each in operations} == {*COLLECTIVES, "message"}
