"""A process notices that the launcher above it is gone, whatever stands between them."""

import os
from pathlib import Path

import pytest

from hvlike.transport.host import parents


def test_a_process_with_its_launcher_is_no_orphan() -> None:
    watch = parents.LauncherWatch()
    assert not watch.is_orphan()


RANK = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "PMIX_NAMESPACE": "job@1"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_JOB_ID": "7"}


def test_the_chain_ends_at_the_first_parent_that_is_not_of_this_rank() -> None:
    processes = {
        10: parents.ParentProcess("python", 9),
        9: parents.ParentProcess("uv", 8),
        8: parents.ParentProcess("prterun", 7),
        7: parents.ParentProcess("bash", 6),
    }
    environments: dict[int | str, dict[str, str]] = {"self": RANK, 10: RANK, 9: RANK, 8: {}, 7: {}}
    # Nothing of the process is replaced: its own watch, in another thread, would find itself an orphan and end it.
    watch = parents.LauncherWatch(lambda: 10, processes.get, lambda process: environments[process])
    assert watch.chain == (10, 9, 8)
    assert watch.launcher == 8
    assert not watch.is_orphan()
    processes[8] = parents.ParentProcess("prterun", 1)  # nohup: mpirun has another parent, and lives
    assert not watch.is_orphan()
    del processes[8]  # It is hidden from here, or a zombie that nobody has looked at
    assert not watch.is_orphan()
    processes[9] = parents.ParentProcess("uv", 1)  # mpirun is gone
    assert watch.is_orphan()


@pytest.mark.parametrize(
    ("own", "parent", "length"),
    [
        (RANK, RANK, 2),
        (RANK, RANK | {"PMIX_RANK": "2", "OMPI_COMM_WORLD_RANK": "2"}, 1),
        (RANK, RANK | {"PMIX_NAMESPACE": "job@2"}, 1),
        (RANK | STEP, STEP, 1),  # mpirun in a batch step
        (STEP, STEP, 2),
        ({"PMI_RANK": "1"}, {"PMI_RANK": "1"}, 2),
        ({"PMI_RANK": "1"}, {}, 1),
        ({}, {}, 1),
    ],
)
def test_what_belongs_to_a_rank_is_told_by_the_launchers_variables(
    own: dict[str, str], parent: dict[str, str], length: int
) -> None:
    environments: dict[int | str, dict[str, str]] = {"self": own, 10: parent, 9: {}}
    watch = parents.LauncherWatch(
        lambda: 10, lambda _: parents.ParentProcess("any", 9), lambda process: environments[process]
    )
    assert len(watch.chain) == length


def test_names_with_blanks_and_parentheses_are_read() -> None:
    assert parents.parse_stat("42 (a (b) c) S 7 42 42 0") == parents.ParentProcess("a (b) c", 7)
    assert parents.read_process(os.getpid()) == parents.ParentProcess(
        Path("/proc/self/comm").read_text().rstrip("\n"), os.getppid()
    )
