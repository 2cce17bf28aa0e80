"""The random programs have in them what they are there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.autograd.operations import CHANGES, OPERATIONS
from support.autograd.programs import Apply, ChangeInPlace, Fetch, Hook, Lookup, Program, Refer, Remote, Run, Start
from support.autograd.random_graphs import run_in_one_process
from support.autograd.random_programs import draw_program

KEYS = [(seed, workers, seed % workers) for workers in (2, 3, 4) for seed in range(100)]
PROGRAMS = [draw_program(*key) for key in KEYS]


def callers(program: Program) -> dict[int, int]:
    """Who calls each routine."""
    return {
        step.routine: number
        for number, routine in enumerate(program.routines)
        for step in routine.steps
        if isinstance(step, Run)
    }


def goes_round(program: Program) -> bool:
    """A calls B, B calls C, and C calls A again."""
    by = callers(program)
    for number in by:
        path = [number]
        while path[-1] in by:
            path.append(by[path[-1]])
        workers = [program.routines[each].worker for each in path]
        fours = [workers[at : at + 4] for at in range(len(workers) - 3)]
        if any(four[0] == four[3] and len(set(four)) == 3 for four in fours):
            return True
    return False


def steps(program: Program, kind: type) -> list[Any]:
    return [step for routine in program.routines for step in routine.steps if isinstance(step, kind)]


def has(kind: type) -> Callable[[Program], bool]:
    return lambda program: bool(steps(program, kind))


WANTED: dict[str, Callable[[Program], bool]] = {
    "calls that come back to where they began": goes_round,
    "a call of a worker to itself": lambda program: any(
        program.routines[callee].worker == program.routines[caller].worker
        for callee, caller in callers(program).items()
    ),
    "a tensor twice in one message": lambda program: any(
        len(set(step.values)) < len(step.values) for step in steps(program, Run)
    ),
    "several roots": lambda program: any(len(each.roots) > 1 for each in program.passes),
    "several passes over one graph": lambda program: len(program.passes) > 1,
    "a pass that another worker begins": lambda program: any(each.distant for each in program.passes),
    "a leaf without grad": lambda program: any(not leaf.grad for leaves in program.leaves for leaf in leaves),
    "calls at the same time": has(Start),
    "hooks": has(Hook),
    "changes in place": has(ChangeInPlace),
    "RRefs by remote": has(Remote),
    "RRefs of the caller": has(Refer),
    "to_here": has(Fetch),
    "an RRef as an argument": lambda program: any(step.references for step in steps(program, Run)),
    "sparse gradients": has(Lookup),
}


@pytest.mark.parametrize("what", WANTED)
def test_there_are_enough_programs_with(what: str) -> None:
    found = sum(map(WANTED[what], PROGRAMS))
    assert found >= 20


def test_every_operation_is_in_some_program() -> None:
    assert {step.operation for program in PROGRAMS for step in steps(program, Apply)} == set(OPERATIONS)
    assert {step.change for program in PROGRAMS for step in steps(program, ChangeInPlace)} == set(CHANGES)


def test_fast_can_run_some_and_not_others() -> None:
    used = [run_in_one_process(key).every_result_is_used for key in KEYS[::10]]
    assert 5 < sum(used) < 25


def test_a_leaf_that_is_used_twice_is_sent_as_one_tensor() -> None:
    """Once the receiver was thought to have two, and changed in place what it multiplied by itself."""
    assert run_in_one_process((39020, 3, 2)).messages


def test_a_view_of_what_had_no_gradient_is_not_changed_in_place() -> None:
    """Once it was, after a change of what it looks at had brought one: torch takes it for a leaf."""
    assert run_in_one_process((2543011, 2, 1)).messages
