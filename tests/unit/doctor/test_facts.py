"""What is read from files and variables is what they say."""

import mmap
from pathlib import Path

import pytest

from hvlike.doctor import gpus, launching, machine, software
from hvlike.launch import trial
from hvlike.transport.host.find_mpirun import Mpirun
from hvlike.transport.host.launcher_table import HYDRA, UNKNOWN


def test_the_settings_are_read() -> None:
    seen = launching.collect_settings(
        {"HOROVOD_CPU_OPERATIONS": "MPI", "HVLIKE_OVERLAP": "perhaps", "HVLIKE_TIMELIN": "x"}
    )
    ignored, unknown = seen.useless
    assert ignored.startswith("HOROVOD_CPU_OPERATIONS is ignored: ")
    assert unknown == "HVLIKE_TIMELIN is set, but there is no such setting: did you mean HVLIKE_TIMELINE?"
    assert "HVLIKE_OVERLAP" in seen.refused
    assert launching.collect_settings({}) == launching.Settings("", ())


MOUNTS = [("/", "ext4"), ("/home", "nfs4"), ("/home/me/disk", "xfs"), ("/homework", "tmpfs")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp", "ext4"),
        ("/home", "nfs4"),
        ("/home/me", "nfs4"),
        ("/home/me/disk/a", "xfs"),
        ("/homework/a", "tmpfs"),
        ("/homes", "ext4"),
    ],
)
def test_a_path_lies_on_the_innermost_mount(path: str, kind: str) -> None:
    assert machine.kind_of(path, MOUNTS) == kind


def test_a_folder_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert "No such file" in machine.collect_temporary_files().wrong
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert machine.collect_temporary_files().wrong == ""
    assert list(tmp_path.iterdir()) == []


def test_how_hvlike_shares_memory_is_seen_in_the_map(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    for text, expected in (("", None), ("7f /memfd:hvlike (deleted)", "memfd"), ("7f /dev/shm/hvlike-x", "/dev/shm")):
        path.write_text(text)
        assert machine.mapped_by_hvlike(path) == expected


def test_every_copy_of_nccl_is_seen_once(tmp_path: Path) -> None:
    first, second = tmp_path / "libnccl.so.2", tmp_path / "b c" / "libnccl.so.2.21"
    second.parent.mkdir()
    maps = []
    for path in (first, second, first):
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    seen = gpus.collect_nccl_state().loaded
    for each in maps:
        each.close()
    assert [path for path in seen if path.startswith(str(tmp_path))] == [str(second), str(first)]


def test_the_software_of_this_process_is_found() -> None:
    found = software.collect_software()
    assert list(found.versions) == ["Python", "hvlike", "torch", "mpi4py"]
    assert "none" not in found.versions.values()


def test_a_launcher_that_starts_two_jobs_is_seen_through(tmp_path: Path) -> None:
    twice = tmp_path / "mpirun"
    twice.write_text("#!/bin/sh\necho ranks: 1\necho ranks: 1\necho some noise\n")
    twice.chmod(0o755)
    tried = trial.try_ranks(Mpirun(str(twice), HYDRA, "1", ()), 60)
    assert (tried.status, tried.sizes) == (0, (1, 1))
    assert tried.lines == ("ranks: 1", "ranks: 1", "some noise")


def test_a_launcher_that_hangs_is_stopped(tmp_path: Path) -> None:
    slow = tmp_path / "mpirun"
    slow.write_text("#!/bin/sh\nexec sleep 3600\n")
    slow.chmod(0o755)
    tried = trial.try_ranks(Mpirun(str(slow), UNKNOWN, "1", ()), 0.1)
    assert (tried.status, tried.sizes) == (None, ())
