"""Imitations of launchers and containers that start real ranks. Each takes the options of its documentation and refuses
others, passes on the variables that the real one passes on, and sets those by which its ranks know their place.

Ranks find each other by PMIx, through Open MPI's mpirun, whatever interface was asked for. This file is also the
program: `install` writes the scripts that run it. It imports nothing but the standard library, and none of the tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import NamedTuple

SOCKETS = "/var/spool/slurmd/pmix.17.0"  # Where Slurm has its sockets; a container sees them only if it is told to


class Options(NamedTuple):
    """The options of a command that stand before the program."""

    with_value: str
    switches: str = ""  # May have a value behind "="
    subcommand: str = ""


class Launcher(NamedTuple):
    """What starts ranks."""

    name: str  # As hvlike names it
    path: str  # Below a site's folder
    options: Options
    number: tuple[str, ...]  # The options with the number of ranks
    variables: str  # Of a rank, as a shell sets them from PMIx's and Open MPI's
    allocation: str  # A variable that shows that there is an allocation
    inherited: str = ""  # The variable that has the number of ranks where no option has it


class Container(NamedTuple):
    """What runs a program in an image. It keeps the environment, unless `passed` says otherwise."""

    options: Options
    passed: Mapping[str, str] | None = None  # Patterns of variables, by the switch that passes them on
    drops: tuple[str, ...] = ()  # Switches that empty the environment
    binds: tuple[str, ...] = ()  # Options that bind folders
    bound_by: tuple[str, ...] = ()  # Switches that bind Slurm's folder
    sees_sockets: bool = False  # As the site has configured it
    folder: tuple[str, ...] = ()  # Options with the folder to start in; it must be bound


_SIZE, _RANK = "$OMPI_COMM_WORLD_SIZE", "$PMIX_RANK"
LAUNCHERS = {
    "srun": Launcher(
        "Slurm's srun",
        "srun",
        Options(
            "-n --ntasks -N --nodes -c --cpus-per-task --mpi --cpu-bind --distribution --gpus-per-task --gpu-bind",
            "--overlap --overcommit --kill-on-bad-exit --export",
        ),
        ("-n", "--ntasks"),
        f"SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={_SIZE} SLURM_PROCID={_RANK} SLURM_LOCALID={_RANK} "
        f"PMIX_SERVER_TMPDIR={SOCKETS}",
        "SLURM_JOB_ID",
        "SLURM_NTASKS",
    ),
    "mpiexec": Launcher(
        "PALS' mpiexec",
        "pals/1.4/bin/mpiexec",
        Options("-n --ppn --depth --cpu-bind --pmi --env --hostfile", "--envall"),
        ("-n",),
        f"PALS_RANKID={_RANK} PALS_LOCAL_RANKID={_RANK} PALS_LOCAL_SIZE={_SIZE}",
        "PBS_JOBID",
    ),
    "jsrun": Launcher(
        "LSF's jsrun",
        "jsrun",
        Options("--nrs --np --tasks_per_rs --cpu_per_rs --gpu_per_rs --rs_per_host --bind"),
        ("--nrs", "--np"),
        f"JSM_NAMESPACE_SIZE={_SIZE} JSM_NAMESPACE_RANK={_RANK} JSM_NAMESPACE_LOCAL_RANK={_RANK}",
        "LSB_JOBID",
    ),
    "flux": Launcher(
        "Flux",
        "flux",
        Options("-n -N -c -g -o", "-x", "run"),
        ("-n",),
        f"FLUX_JOB_SIZE={_SIZE} FLUX_TASK_RANK={_RANK} FLUX_TASK_LOCAL_ID={_RANK}",
        "FLUX_URI",
    ),
}

_APPTAINER = Container(
    Options("--bind -B --env --pwd", "--cleanenv -e --containall -C --nv --rocm --sharens", "exec"),
    drops=("--cleanenv", "-e", "--containall", "-C"),
    binds=("--bind", "-B"),
)
CONTAINERS = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "shifter": Container(
        Options("--image -i --module -m --env -e --volume -V --workdir -w", "--clearenv -E"),
        drops=("--clearenv", "-E"),
        binds=("--volume", "-V"),
        sees_sockets=True,
    ),
    "podman-hpc": Container(
        Options("-e --env -v --volume -w --workdir", "--rm --mpi --openmpi-pmi2 --openmpi-pmix --gpu --nccl", "run"),
        passed={
            "--mpi": "SLURM_* PALS_* PMI_*",
            "--openmpi-pmi2": "SLURM_* PALS_* PMI_*",
            "--openmpi-pmix": "SLURM_* SLURMD_* PALS_* PMI_* PMIX_*",
        },
        binds=("-v", "--volume"),
        bound_by=("--mpi", "--openmpi-pmi2", "--openmpi-pmix"),
        folder=("-w", "--workdir"),
    ),
}
OF_IMAGE = "PATH PYTHONPATH HOME HVLIKE_TEST_JOB TMPDIR OPAL_PREFIX OMPI_MCA_*"
"""What an image has by itself: Python's packages, and what the tests need."""
CONTAINED = "IMITATED_IMAGE"
"""The variable of a rank that names its image."""

# A process stays between the launcher and the rank.
_RANKS = """export {variables}
unset "${{!OMPI_COMM_WORLD_@}}"
"$@"; exit $?"""


def install(site: Path, mpirun: Path, commands: Iterable[str] = (*LAUNCHERS, *CONTAINERS)) -> str:
    """Write imitations below a folder; return the folders for PATH."""
    folders = {}
    for command in commands:
        path = site / (LAUNCHERS[command].path if command in LAUNCHERS else command)
        path.parent.mkdir(parents=True, exist_ok=True)
        run = [sys.executable, "-IS", __file__, str(mpirun), str(notes_of(site, command)), command]
        path.write_text(f'#!/bin/sh\nexec {" ".join(map(quote, run))} "$@"\n')
        path.chmod(0o755)
        folders[str(path.parent)] = None
    return os.pathsep.join(folders)


def notes_of(site: Path, command: str) -> Path:
    """The file with the arguments of the last call of a launcher that started ranks."""
    return site / f"{command}.called"


def split(command: str, options: Options, words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The options with their values, and what stands behind them. Ends the process at one that is not known."""
    if options.subcommand and words[:1] != [options.subcommand]:
        sys.exit(f"{command}: no subcommand {words[:1]}")
    given, rest = [], words[1:] if options.subcommand else words[:]
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in options.with_value.split():
            value = value if equals else rest.pop(0)
        elif name not in options.switches.split():
            sys.exit(f"{command}: unrecognized option '{name}'")
        given.append((name, value))
    return given, rest


def start(command: str, words: list[str], mpirun: str, notes: str) -> None:
    """Become an mpirun that starts the ranks, or answer a question."""
    if "--version" in words:
        print("version 1.0")
    elif words == ["--mpi=list"]:
        print("MPI plugin types are...\n\tcray_shasta\n\tpmi2\n\tpmix\n\tnone")
    elif words == ["resource", "list", "-n", "-o", "{nnodes}"]:
        print(1)
    else:
        Path(notes).write_text(" ".join(words))
        launcher = LAUNCHERS[command]
        given, program = split(command, launcher.options, words)
        numbers = [value for name, value in given if name in launcher.number]
        number = numbers[-1] if numbers else os.environ[launcher.inherited]
        ranks = ["bash", "-c", _RANKS.format(variables=launcher.variables), "rank", *program]
        os.execv(mpirun, [mpirun, "--oversubscribe", "--bind-to", "none", "-n", number, *ranks])


def enter(command: str, words: list[str]) -> None:
    """Become the program in an image, which comes behind the options, or in --image."""
    container = CONTAINERS[command]
    given, rest = split(command, container.options, words)
    images = [value for name, value in given if name in ("--image", "-i")]
    image, program = (images[0], rest) if images else (rest[0], rest[1:])
    names = [name for name, _ in given]
    folders = [value for name, values in given if name in container.binds for value in values.split(",")]
    bound = [folder.partition(":")[0] for folder in folders]

    hidden = not container.sees_sockets and not any(switch in names for switch in container.bound_by)
    if hidden and not any(SOCKETS.startswith(folder) for folder in bound):
        sys.exit(f"{command}: {SOCKETS} is not in the container: {bound}")
    for folder in (value for name, value in given if name in container.folder):
        if folder not in bound:
            sys.exit(f"{command}: the folder {folder} does not exist in the container")
        os.chdir(folder)
    patterns = ["*"]
    if container.passed is not None or any(switch in names for switch in container.drops):
        of_switches = (container.passed or {}).items()
        named = [value for name, value in given if name in ("-e", "--env")]
        patterns = [*OF_IMAGE.split(), *named, *" ".join(text for name, text in of_switches if name in names).split()]
    kept = {name: value for name, value in os.environ.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    os.execvpe(program[0], program, kept | {CONTAINED: image})


if __name__ == "__main__":
    _, mpirun_of_ranks, file_of_notes, called, *arguments = sys.argv
    if called in LAUNCHERS:
        start(called, arguments, mpirun_of_ranks, file_of_notes)
    else:
        enter(called, arguments)
