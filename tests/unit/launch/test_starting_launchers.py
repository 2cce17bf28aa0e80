"""Inside an allocation without mpirun its batch system starts the ranks: srun, jsrun, Flux and PALS, imitated here.

Each imitation answers to --version, and to --mpi=list, as the documentation of the launcher says.
"""

import os
from pathlib import Path
from shlex import quote

import pytest

from hvlike.errors import LaunchError, UsageError
from hvlike.launch import command as launch
from hvlike.launch import run as run_module
from hvlike.transport.host import find_mpirun as find_module
from hvlike.transport.host.find_mpirun import MpiLibrary, Mpirun, find_mpirun, offered_interfaces

LISTS = {
    "22.05": "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: "
    "pmix_v4\n",
    "20.02": "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix\n",
    "ParaStation": "MPI plugin types are...\n\tpspmix\n\tnone\n\tpspmi\n",
    "bare": "MPI plugin types are...\n\tnone\n",
}
OPEN_MPI = MpiLibrary("", "Open MPI", "5.0", "Open MPI v5.0.9")
MPICH = MpiLibrary("", "MPICH", "4.3", "MPICH Version: 4.3.1")
INTEL = MpiLibrary("", "Intel MPI", "2021.13", "Intel(R) MPI Library 2021.13")
CRAY = MpiLibrary("", "MPICH", "3.4", "MPI VERSION    : CRAY MPICH version 8.1.31.9 (ANL base 3.4a2)")


def program(path: Path, answer: str, interfaces: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncase $1 in\n--mpi=list) echo '{interfaces}' >&2 ;;\n*) echo '{answer}' ;;\nesac\n")
    path.chmod(0o755)
    return path


def command(library: MpiLibrary, folder: Path, **variables: str) -> str:
    """How two ranks of `true` are started, without the folder of the launcher."""
    found = find_mpirun(library, {"PATH": f"{folder}:/usr/bin:/bin", **variables})
    return " ".join(found.command(2, ["true"])).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("library", "site", "interface"),
    [
        (OPEN_MPI, "22.05", "pmix"),
        (OPEN_MPI, "20.02", "pmix"),
        (OPEN_MPI, "ParaStation", "pspmix"),
        (MPICH, "22.05", "pmi2"),
        (MPICH, "ParaStation", "pspmix"),
        (INTEL, "20.02", "pmi2"),
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
    program(tmp_path / "mpirun", "mpirun (Open MPI) 5.0.11")
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


@pytest.mark.parametrize(
    ("site", "names"),
    [("22.05", "pmix cray_shasta pmi2"), ("20.02", "pmi2 pmix"), ("ParaStation", "pspmix"), ("bare", "")],
)
def test_what_srun_offers_is_read_from_its_list(site: str, names: str) -> None:
    assert offered_interfaces(LISTS[site]) == names.split()


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
