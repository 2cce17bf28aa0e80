"""What hvd.run hands to the ranks of a job, and what they leave: results, or the first exception with its traceback."""

import json
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hvlike.errors import LaunchError, UsageError
from hvlike.launch import job_folder as call_module
from hvlike.launch.job_folder import (
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
