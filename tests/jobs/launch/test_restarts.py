"""Restarts and preemption of whole jobs: the result has the bits of a run that nobody has disturbed.

One of each here; `python -m support.restarts` does as many as one likes, at random moments.
"""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.hosts import hosts
from support.restarts.disturbed import Disturbed, Outcome, reference

pytestmark = [pytest.mark.in_turn(1), pytest.mark.timeout(300)]

RANKS = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training ends with."""
    return reference(RANKS, tmp_path_factory.mktemp("reference"))


def check(outcome: Outcome, undisturbed: str, expected: str) -> None:
    assert outcome.compared(undisturbed, 0.0).faults == (), outcome
    assert expected in ", ".join(outcome.events)


def test_after_a_killed_mpirun_and_a_damaged_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    outcome = Disturbed(RANKS, tmp_path, random.Random(1), ("mpirun",)).restarts()
    check(outcome, undisturbed, "killed mpirun")


def test_after_a_killed_rank(undisturbed: str, tmp_path: Path) -> None:
    outcome = Disturbed(RANKS, tmp_path, random.Random(2), ("the last",)).restarts()
    check(outcome, undisturbed, "killed the last")


def test_after_a_killed_daemon_of_another_host(undisturbed: str) -> None:
    # Open MPI takes a comma in the path of a hostfile for the end of it, and pytest's folder may have some.
    with hosts(RANKS) as machines, TemporaryDirectory(prefix="hvlike-restarts-") as folder:
        outcome = Disturbed(RANKS, Path(folder), random.Random(1), ("a daemon",), machines=machines).restarts()
    check(outcome, undisturbed, "killed a daemon")


def test_after_it_was_asked_to_end(undisturbed: str, tmp_path: Path) -> None:
    outcome = Disturbed(RANKS, tmp_path, random.Random(1), asks=1).preemptions()
    check(outcome, undisturbed, "75")
