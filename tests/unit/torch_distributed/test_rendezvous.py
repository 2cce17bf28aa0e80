"""Rank and number of ranks are MPI's: what says otherwise is refused, with the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.errors import LaunchError, UsageError
from hvlike.torch_distributed.store import check_environment, check_place, set_variables


def world(rank: int, size: int) -> Any:
    nodes = (tuple(range(size)),)
    found = SimpleNamespace(rank=rank, size=size, local_rank=rank, local_size=size, nodes=nodes)
    found.place = found
    return found


def test_what_is_left_out_or_right_is_accepted() -> None:
    check_place(None, None, world(1, 4))
    check_place(1, 4, world(1, 4))
    check_environment({}, 1, 4)
    check_environment({"RANK": "1", "WORLD_SIZE": "4"}, 1, 4)


def test_another_place_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rank=2, but this is MPI's rank 1 and world_size=8, but MPI has started 4"):
        check_place(2, 8, world(1, 4))


def test_a_process_that_no_mpirun_has_started_is_told_to_use_it() -> None:
    with pytest.raises(LaunchError, match=r"world_size=4, but MPI has started one process.*mpirun -n 4 python"):
        check_place(1, 4, world(0, 1))
    with pytest.raises(LaunchError, match=r"WORLD_SIZE=4, but MPI has started one process.*mpirun -n 4 python"):
        check_environment({"RANK": "1", "WORLD_SIZE": "4"}, 0, 1)


def test_variables_that_say_otherwise_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"RANK=0, but this is MPI's rank 1 of 4"):
        check_environment({"RANK": "0", "WORLD_SIZE": "4"}, 1, 4)


def test_the_variables_of_the_launcher_may_be_those_of_a_larger_job() -> None:
    """hvlike.init(comm=[2, 3]) in a job of four ranks."""
    environment = {"RANK": "3", "WORLD_SIZE": "4", "PMI_RANK": "3", "PMI_SIZE": "4"}
    check_environment(environment, 1, 2)
    set_variables(environment, world(1, 2))
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == ("1", "2", "0")
