"""A rank knows its launcher by what that sets, as documentation and sources of each say; a lone rank is refused."""

import multiprocessing

import pytest

from hvlike.errors import LaunchError
from hvlike.transport.host import launchers
from hvlike.transport.host.launcher_table import OWN_VARIABLES
from hvlike.transport.host.launchers import check_launcher, detect_launcher, hidden_launcher, local_rank, rank_told
from hvlike.transport.host.parents import ParentProcess, rank_of

STEP = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
STEP |= {"SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
PMIX = {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.17.0"}
CRAY = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2", "PMI_JOBID": "17"}
CRAY |= {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PALS_NODEID": "1", "PALS_APID": "17.0"}
OF_PALS = {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4"}
FLUX = {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_ID": "f1"}
JSM = {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"}
HYDRA = PMI | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"} | PMIX

RANK_2_OF_4 = [
    (STEP, "Slurm's srun"),
    (STEP | PMIX, "Slurm's srun"),
    (STEP | PMI, "Slurm's srun"),
    (STEP | CRAY, "Slurm's srun"),
    (OF_PALS | PMI, "PALS' mpiexec"),
    (JSM | PMIX, "LSF's jsrun"),
    (FLUX | PMI, "Flux"),
    (FLUX | PMIX, "Flux"),
    (FLUX | CRAY, "Flux"),
    (HYDRA, "MPICH's mpiexec (Hydra, Intel MPI)"),
    (MPIRUN, "Open MPI's mpirun"),
    (STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | HYDRA, "MPICH's mpiexec (Hydra, Intel MPI)"),
    (OF_PALS | HYDRA, "MPICH's mpiexec (Hydra, Intel MPI)"),
    (STEP | {"SLURM_PROCID": "0"} | MPIRUN, "Open MPI's mpirun"),
]


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
OTHERS = [
    (PMI, "MPICH's mpiexec (Hydra, Intel MPI)", 4),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH's mpirun", 2),
    (TORCHRUN, "torchrun", 2),
    ({"HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, "horovodrun without MPI (Gloo)", 2),
    # mpirun inside a Slurm step: the step started one daemon a node, mpirun started the ranks.
    ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, "Open MPI's mpirun", 4),
    ({"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, "MPICH's mpiexec (Hydra, Intel MPI)", 1),
    # With one rank on each node Hydra's ranks and those of the step are the same: it numbers local ranks.
    (STEP | PMI | {"MPI_LOCALNRANKS": "1"}, "MPICH's mpiexec (Hydra, Intel MPI)", 4),
]
NO_LAUNCHER = [
    {},
    {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # sbatch alone
    {"WORLD_SIZE": "4", "RANK": "0"},  # not torchrun's: many scripts set these
    {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0"},  # without Gloo's rendezvous it was mpirun
    {"OMPI_COMM_WORLD_SIZE": ""},
    {"PMI_SIZE": "many"},
]


@pytest.mark.parametrize(
    ("environment", "name", "size"), [*((environment, name, 4) for environment, name in RANK_2_OF_4), *OTHERS]
)
def test_each_launcher_is_detected_and_its_singletons_are_refused(
    environment: dict[str, str], name: str, size: int
) -> None:
    launcher = detect_launcher(environment)
    assert launcher is not None
    assert (launcher.name, launcher.size, launcher.at_least) == (name, size, False)
    check_launcher(environment, 2, "Some MPI")
    if size == 1:
        check_launcher(environment, 1, "Some MPI")
        return
    with pytest.raises(LaunchError) as caught:
        check_launcher(environment, 1, "Some MPI 1.2")
    assert all(word in str(caught.value) for word in (name, f"{size} processes", "Some MPI 1.2", "mpirun", "unset"))


@pytest.mark.parametrize("environment", NO_LAUNCHER)
def test_no_launcher(environment: dict[str, str]) -> None:
    assert detect_launcher(environment) is None
    check_launcher(environment, 1, "Some MPI")


@pytest.mark.parametrize("environment", [environment for environment, _ in RANK_2_OF_4])
def test_each_launcher_tells_rank_and_local_rank(environment: dict[str, str]) -> None:
    launcher = detect_launcher(environment)
    assert launcher is not None
    assert launcher.rank == rank_told(environment) == 2
    assert local_rank(environment) == "0"


def test_the_number_of_the_process_does_not_come_from_another_launcher() -> None:
    silent = detect_launcher({"PMI_SIZE": "2", "SLURM_PROCID": "1"})
    assert silent is not None
    assert silent.rank is None


def test_launchers_that_speak_pmi_may_call_the_local_rank_by_that_name() -> None:
    assert local_rank(CRAY | {"PMI_LOCAL_RANK": "1"}) == "1"


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        (OF_PALS | PMIX, 3),
        (OF_PALS | PMIX | {"PALS_RANKID": "0", "PMIX_RANK": "0"}, 2),
        (PMIX, 3),
    ],
)
def test_a_launcher_that_tells_no_number_of_ranks_has_started_at_least_so_many(
    environment: dict[str, str], size: int
) -> None:
    launcher = detect_launcher(environment)
    assert launcher is not None
    assert (launcher.size, launcher.at_least) == (size, True)
    with pytest.raises(LaunchError, match=rf"started at least {size} processes \(P\w+={launcher.rank}\)"):
        check_launcher(environment, 1, "MPICH Version: 4.3")
    check_launcher(environment, 4, "MPICH Version: 4.3")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (STEP, ["--mpi=pmix", "pspmix", "cray_shasta", "pmi2", "PMIX_SERVER_TMPDIR"]),
        (OF_PALS, ["--pmi=pmix", "PMIX_SERVER_TMPDIR"]),
        (TORCHRUN, ["mpirun -n 2 python"]),
    ],
)
def test_the_advice_is_that_for_the_launcher(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        check_launcher(environment, 1, "Open MPI")
    assert all(word in str(caught.value) for word in words)


def test_two_ranks_of_one_machine_differ_and_children_of_one_do_not() -> None:
    for environment, _ in RANK_2_OF_4:
        assert rank_of(environment) == rank_of(environment | {"LOCAL_RANK": "0"}) != ()
        other = environment | {name: "3" for name in environment if name.endswith(("RANK", "RANKID", "PROCID"))}
        assert rank_of(environment) != rank_of(other)
    # Nor does one of another job, or a rank of mpirun and the batch step around it.
    assert len({rank_of(each) for each in (MPIRUN, MPIRUN | {"PMIX_NAMESPACE": "2"}, STEP, STEP | MPIRUN)}) == 3
    assert rank_of({"PMI_RANK": "1"}) != rank_of({}) == ()


def test_a_job_inside_a_rank_does_not_inherit_its_place() -> None:
    kept = {name for environment, _ in RANK_2_OF_4 for name in environment if not name.startswith(OWN_VARIABLES)}
    # Of an allocation srun itself needs the variables, and sets those of the step anew.
    assert {name for name in kept if not name.startswith("SLURM_")} == set()


def test_a_wrapper_that_drops_the_variables_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = {12: {}, 11: STEP, 10: {}}
    monkeypatch.setattr(launchers, "environment_of", lambda process: environments[process])
    monkeypatch.setattr(launchers, "read_process", lambda process: ParentProcess("shifter", process - 1))
    found = hidden_launcher({}, lambda: iter((12, 11, 10)))
    assert found is not None
    assert (found.name, found.wrapper) == ("Slurm's srun", "shifter")
    assert hidden_launcher(STEP, lambda: iter((12, 11, 10))) is None
    assert hidden_launcher({}, lambda: iter((12, 10))) is None
    environments[11] = STEP | {"SLURM_STEP_NUM_TASKS": "1"}
    assert hidden_launcher({}, lambda: iter((12, 11, 10))) is None


def test_a_wrapper_that_makes_way_leaves_the_launcher_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    script = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    names = {12: "bash", 11: "slurmstepd", 10: "slurmd"}
    environments: dict[int, dict[str, str]] = {12: {"HOME": "/root"}, 11: {}, 10: {}}
    monkeypatch.setattr(launchers, "environment_of", lambda process: environments[process])
    monkeypatch.setattr(launchers, "read_process", lambda process: ParentProcess(names[process], process - 1))
    # `srun env -i python`, then with a shell in between.
    assert hidden_launcher({"HOME": "/root"}, lambda: iter((11, 10))) == ("Slurm's srun", "this process", "slurmstepd")
    assert hidden_launcher({"HOME": "/root"}, lambda: iter((12, 11, 10))) is not None
    # What a batch script starts without srun is alone by right.
    environments[12] = script
    assert hidden_launcher(script, lambda: iter((11, 10))) is None
    assert hidden_launcher({}, lambda: iter((12, 11, 10))) is None


def test_a_rank_whose_launcher_is_hidden_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "processes_above", lambda: iter((11,)))
    monkeypatch.setattr(launchers, "environment_of", lambda process: STEP)
    text = launchers.lone_child_warning({}, 1)
    assert "Slurm's srun started 4 processes (SLURM_STEP_NUM_TASKS=4)" in text
    assert "--cleanenv" in text
    assert launchers.lone_child_warning({}, 4) == ""


def test_a_child_of_multiprocessing_without_a_launcher_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launchers.lone_child_warning({}, 1) == ""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert "mpirun -n N python" in launchers.lone_child_warning({}, 1)
    assert launchers.lone_child_warning({}, 2) == ""
    assert launchers.lone_child_warning({"OMPI_COMM_WORLD_SIZE": "1"}, 1) == ""
