"""hvd.run refuses what cannot work, starts launchers with their flags, and brings back results or exceptions."""

import json
import os
import pickle
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hvlike.errors import LaunchError, UsageError
from hvlike.launch import job_folder as call_module
from hvlike.launch import run as run_module
from hvlike.launch.job_folder import (
    RANK_PROGRAM,
    first_failure,
    raise_again,
    rank_of,
    read_call,
    result_of,
    run_rank,
    write_call,
    write_failure,
    write_result,
)
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
    started.silent = 2
    with pytest.raises(LaunchError, match="rank 2 has left no result"):
        run(len, ("four",), num_proc=3)
    assert started.command[:4] == ["mpirun", "--flag", "-n", "3"]


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


class Unfriendly(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def add(tensor: torch.Tensor, *, number: int) -> torch.Tensor:
    return tensor + number


def act_as_rank(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    run_rank(str(folder))


def failed(folder: Path, ranks: int) -> Any:
    failure = first_failure(folder, ranks)
    assert failure is not None
    return failure


def test_a_rank_calls_the_function_and_leaves_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_call(tmp_path, partial(add, torch.ones(2), number=3))
    act_as_rank(1, tmp_path, monkeypatch)
    left = result_of(tmp_path, 1)
    assert left is not None
    assert torch.equal(pickle.loads(left), torch.full((2,), 4.0))
    assert result_of(tmp_path, 0) is None
    assert first_failure(tmp_path, 2) is None


def test_a_function_without_a_name_travels_by_cloudpickle(tmp_path: Path) -> None:
    offset = 5
    write_call(tmp_path, partial(lambda number: number + offset, 2))
    assert read_call(tmp_path)() == 7


def test_modules_are_found_where_the_caller_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    write_call(tmp_path, partial(add))
    monkeypatch.setattr(sys, "path", sys.path[1:])
    read_call(tmp_path)
    assert str(tmp_path / "modules") in sys.path


def test_the_exception_of_a_rank_is_left_and_takes_its_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_call(tmp_path, partial(json.loads, "{"))
    with pytest.raises(json.JSONDecodeError):
        act_as_rank(1, tmp_path, monkeypatch)
    with pytest.raises(json.JSONDecodeError) as caught:
        raise_again(failed(tmp_path, 2))
    assert caught.value.pos == 1
    said = str(caught.value.__cause__)
    assert said.startswith("\nrank 1 on ")
    assert "JSONDecodeError" in said
    assert "write_result(folder, rank, call())" in said


def test_the_first_exception_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {2: 10.0, 0: 11.0, 1: 10.0}
    for rank, seconds in times.items():
        monkeypatch.setattr("hvlike.launch.job_folder.time.time", lambda seconds=seconds: seconds)
        write_failure(tmp_path, rank, ValueError(f"of rank {rank}"))
    with pytest.raises(ValueError, match="of rank 1"):
        raise_again(failed(tmp_path, 3))


@pytest.mark.parametrize("error", [Unfriendly("odd", "error"), SystemExit(3), KeyboardInterrupt()])
def test_what_cannot_or_must_not_be_raised_here_is_told_in_words(error: BaseException, tmp_path: Path) -> None:
    write_failure(tmp_path, 0, error)
    with pytest.raises(LaunchError, match=rf"rank 0 on .*: .*{type(error).__name__}.*{error}") as caught:
        raise_again(failed(tmp_path, 1))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("status", "leaves_result"), [(0, True), (None, True), (3, False)])
def test_a_function_that_exits(
    status: int | None, leaves_result: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_call(tmp_path, partial(sys.exit, status))
    with pytest.raises(SystemExit):
        act_as_rank(0, tmp_path, monkeypatch)
    assert (result_of(tmp_path, 0) is not None) == leaves_result
    assert (first_failure(tmp_path, 1) is None) == leaves_result


def test_a_result_that_does_not_pickle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"returned on rank 2 \(a generator\) does not pickle: .* Return tensors"):
        write_result(tmp_path, 2, (each for each in range(3)))


def test_arguments_that_do_not_pickle_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(UsageError, match=r"add or one of its arguments does"):
        write_call(tmp_path, partial(add, file))


def test_without_cloudpickle_a_function_of_the_program_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "find_spec", lambda name: None)
    write_call(tmp_path, partial(add))
    assert read_call(tmp_path).func is add
    monkeypatch.setattr(add, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"add is defined in the program itself.*pip install cloudpickle"):
        write_call(tmp_path, partial(add))


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"])
def test_each_launcher_tells_a_rank_its_number(variable: str) -> None:
    assert rank_of({variable: "12"}) == 12
    with pytest.raises(LaunchError, match="has told this process no rank"):
        rank_of({variable: ""})
