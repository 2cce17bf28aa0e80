"""Simulated jobs of distributed autograd."""

import pytest
from support.simulation.programs.autograd import Autograd
from support.simulation.run import Draw, what_is_wrong


@pytest.mark.parametrize("seed", range(6))
def test_random_jobs(seed: int) -> None:
    job = Draw.of(seed, ["autograd"], range(2, 4), range(1, 3))
    wrong = what_is_wrong(job.run(), job)
    assert wrong is None, f"{job}\n{wrong}"


def test_the_same_seed_gives_the_same_job() -> None:
    stories = [Draw.of(3, ["autograd"], range(2, 4), range(1, 3)).run(trace=True).story for _ in range(2)]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 100


def test_the_programs_have_all_modes_and_optimizers_in_them() -> None:
    programs = [Autograd.draw(seed, 3) for seed in range(30)]
    graphs = [each for program in programs for mine in program.graphs for each in mine]
    assert {each.mode for each in graphs} == {"safe", "smart", "fast"}
    assert any(program.two_threads and len(program.graphs[0]) == 2 for program in programs)
    assert any(len(program.paths) == 2 for program in programs)
