"""The launcher of a job is read from its environment, and N jobs of size 1 are refused."""

import multiprocessing

import pytest

from hvlike.errors import LaunchError
from hvlike.transport.host import launchers

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


@pytest.mark.parametrize(("environment", "name", "size"), ENVIRONMENTS)
def test_detected(environment: dict[str, str], name: str, size: int) -> None:
    launcher = launchers.detect_launcher(environment)
    assert launcher is not None
    assert name in launcher.name
    assert launcher.size == size


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
def test_singletons_refused_with_the_way_out(environment: dict[str, str], name: str, size: int) -> None:
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
