"""Simulated jobs of distributed autograd."""

from support.simulation.programs.autograd import Autograd


def test_the_programs_have_all_modes_and_optimizers_in_them() -> None:
    programs = [Autograd.draw(seed, 3) for seed in range(30)]
    graphs = [each for program in programs for mine in program.graphs for each in mine]
    assert {each.mode for each in graphs} == {"safe", "smart", "fast"}
    assert any(program.two_threads and len(program.graphs[0]) == 2 for program in programs)
    assert any(len(program.paths) == 2 for program in programs)
