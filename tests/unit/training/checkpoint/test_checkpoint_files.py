"""Checkpoint files: whole or not there, whatever interrupts the writing; damage is noticed; old ones go last."""

import os
import signal
from pathlib import Path

import pytest

from hvlike.training.elastic.checkpoint_files import digest_of, list_files, prune, read, write


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
