"""What is odd around a rank on a large system is seen, each with the way out."""

from pathlib import Path

import pytest

from hvlike.launch.trial import Launchers
from hvlike.transport.host.find_mpirun import Mpirun
from hvlike.transport.host.launchers import Hidden
from hvlike.transport.host.surroundings import gpu_support, hidden, look_around, missing_folders, nccl_network


def test_memory_of_gpus_is_not_for_mpi() -> None:
    (odd,) = gpu_support({"MPICH_GPU_SUPPORT_ENABLED": "1"})
    assert "MPICH_GPU_SUPPORT_ENABLED=0" in odd.advice
    assert gpu_support({"MPICH_GPU_SUPPORT_ENABLED": "0"}) == gpu_support({}) == []


@pytest.mark.parametrize("name", ["PMIX_SERVER_TMPDIR", "PALS_SPOOL_DIR"])
def test_a_folder_of_the_launcher_that_a_container_hides(name: str, tmp_path: Path) -> None:
    assert missing_folders({name: str(tmp_path)}) == []
    (odd,) = missing_folders({name: "/var/spool/slurmd/no/such"})
    assert odd.text == f"{name}=/var/spool/slurmd/no/such does not exist here"
    assert "--bind /var/spool/slurmd/no/such" in odd.advice


def test_nccl_on_slingshot_needs_a_network_and_a_plugin(tmp_path: Path) -> None:
    both = nccl_network({}, ["eth0", "hsn0", "hsn1"])
    assert [each.advice.split()[:2] for each in both] == [["export", "NCCL_SOCKET_IFNAME=hsn0"], ["Load", "the"]]
    (tmp_path / "libnccl-net.so").touch()
    named = {"NCCL_SOCKET_IFNAME": "hsn", "LD_LIBRARY_PATH": f"/none:{tmp_path}"}
    assert nccl_network(named, ["hsn0"]) == nccl_network({}, ["eth0"]) == nccl_network({}, []) == []


def test_a_launcher_behind_a_container_that_cleans_the_environment() -> None:
    (odd,) = hidden(Hidden("Slurm's srun", "4 processes", "starter-suid"))
    assert "Slurm's srun end at the process 'starter-suid'" in odd.text
    assert "--cleanenv" in odd.advice
    assert hidden(None) == []


def test_nothing_is_odd_in_a_job_of_mpirun() -> None:
    assert look_around({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, gpus=False) == ()


def test_two_ranks_are_tried_with_what_is_called_by_name_and_its_flags_for_the_library() -> None:
    plain, whole = (Mpirun("/pals/bin/mpiexec", "PALS", "1.4", flags) for flags in ((), ("--pmi=pmix",)))
    other = Mpirun("/usr/bin/srun", "srun", "24.11", ())
    assert Launchers(plain, whole).tried is whole
    assert Launchers(plain, other).tried is plain
    assert Launchers(None, other).tried is other
    assert Launchers(plain, None).tried is plain
