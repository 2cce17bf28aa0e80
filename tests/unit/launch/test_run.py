"""hvd.run refuses what cannot work before it starts anything, and starts each launcher with the flags of its kind."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvlike.errors import LaunchError, UsageError
from hvlike.launch import run as run_module
from hvlike.launch.job_folder import RANK_PROGRAM, write_failure, write_result
from hvlike.launch.run import run
from hvlike.system.system import system
from hvlike.transport.host import find_mpirun
from hvlike.transport.host.find_mpirun import MpiLibrary, Mpirun
from hvlike.transport.host.launcher_table import HYDRA, OPEN_MPI


class Started:
    """Stands for the launcher: keeps what it was started with, and acts as all ranks."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.status = 0
        self.failing: int | None = None
        """The rank that leaves an exception."""
        self.silent: int | None = None
        """The rank that leaves nothing."""

    def run(
        self, command: list[str], environment: dict[str, str], timeout: float | None, folder: str
    ) -> tuple[int, str]:
        self.command, self.environment = command, environment
        for rank in range(2):
            if rank == self.failing:
                write_failure(Path(command[-1]), rank, KeyError("missing"))
            elif rank != self.silent:
                write_result(Path(command[-1]), rank, f"result {rank}")
        return self.status, "first\nlast"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Started:
    double = Started()
    family = getattr(request, "param", OPEN_MPI)
    monkeypatch.setattr(run_module, "run_to_its_end", double.run)
    monkeypatch.setattr(find_mpirun, "ask_mpi_library", lambda environment: MpiLibrary("", "any", "1", "any 1"))
    monkeypatch.setattr(find_mpirun, "find_mpirun", lambda *_: Mpirun("mpirun", family, "1", ("--flag",)))
    for name in [*os.environ]:
        if name.startswith(("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "HVLIKE_", "HOROVOD_")) or name == "OMP_NUM_THREADS":
            monkeypatch.delenv(name)
    return double


def test_results_come_by_rank_and_nothing_is_left(started: Started) -> None:
    results: Sequence[object] = run(len, ("four",))
    assert results == ["result 0", "result 1"]
    assert started.command[:4] == ["mpirun", "--flag", "-n", "2"]
    assert started.command[-3:-1] == ["-c", RANK_PROGRAM]
    assert not Path(started.command[-1]).exists()


def test_the_number_of_ranks_has_horovods_name_too(started: Started) -> None:
    run(len, ("four",), num_proc=2)
    assert started.command[:4] == ["mpirun", "--flag", "-n", "2"]
    started.silent = 2
    with pytest.raises(LaunchError, match="rank 2 has left no result"):
        run(len, ("four",), num_proc=3)
    assert started.command[3] == "3"


@pytest.mark.parametrize(
    ("started", "arguments", "flags"),
    [
        (OPEN_MPI, {"hosts": "a:2,b:2", "env": {"A": "1"}}, "--host a:2,b:2 -x PYTHONPATH -x PYTHONUNBUFFERED -x A"),
        (OPEN_MPI, {"hostfile": Path("hosts"), "mpi_args": ["--verbose"]}, "--hostfile hosts {} --verbose"),
        (HYDRA, {"hosts": "a:2,b:2", "env": {"A": "1"}}, "-hosts a:2,b:2"),
        (HYDRA, {"hostfile": "hosts", "mpi_args": ["-l"]}, "-f hosts -l"),
        (HYDRA, {"env": {"A": "1"}}, ""),
    ],
    indirect=["started"],
)
def test_hosts_and_variables_go_to_the_launcher(
    started: Started, arguments: dict[str, Any], flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(len, ("four",), **arguments)
    exported = "-x PYTHONPATH -x PYTHONUNBUFFERED"
    assert started.command[2 : started.command.index("-n")] == flags.format(exported).split()
    assert started.environment.get("A") == arguments.get("env", {}).get("A")
    # All hosts have to see the folder.
    assert (Path(started.command[-1]).parent == tmp_path) == ("env" not in arguments or "hosts" in arguments)


def test_threads_are_shared_out_unless_the_user_has_said_how_many(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "cores", lambda: frozenset(range(8)))
    run(len, ("four",))
    assert started.environment["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run(len, ("four",))
    assert started.environment["OMP_NUM_THREADS"] == "7"


def test_a_rank_alone_may_start_a_job_and_hides_its_own_launcher_from_it(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setenv("PMIX_RANK", "0")
    run(len, ("four",))
    assert not {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"} & set(started.environment)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"this process is a rank of a job of Open MPI's mpirun"):
        run(len, ("four",))


def test_a_job_that_dies_without_an_exception_shows_its_last_lines(started: Started) -> None:
    started.silent = 0
    started.status = 139
    with pytest.raises(LaunchError, match=r"ended with status 139 and rank 0 has left no result(.|\n)*first\nlast"):
        run(len, ("four",))


def test_the_exception_of_a_rank_goes_before_the_results_of_others(started: Started) -> None:
    started.failing = 1
    with pytest.raises(KeyError, match="missing"):
        run(len, ("four",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"func": 3}, "expects a function, got int"),
        ({"func": len, "np": 0}, "a whole number above 0, got 0"),
        ({"func": len, "np": True}, "a whole number above 0, got True"),
        ({"func": len, "num_proc": 0}, "a whole number above 0, got 0"),
        ({"func": len, "np": 2, "num_proc": 2}, "two names of one argument"),
        ({"func": len, "hosts": "a", "hostfile": "b"}, "not both"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str, started: Started) -> None:
    with pytest.raises(UsageError, match=message):
        run(**arguments)
    assert not started.command
