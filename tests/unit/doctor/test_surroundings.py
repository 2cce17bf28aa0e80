"""What is odd around a rank on a large system is seen, each with the way out."""

import os
import socket
from pathlib import Path

import pytest

from hvlike.launch.trial import Launchers
from hvlike.transport.host.find_mpirun import Mpirun
from hvlike.transport.host.launchers import Hidden
from hvlike.transport.host.surroundings import (
    closed_descriptor,
    gpu_support,
    hidden,
    listening_ports,
    look_around,
    missing_folders,
    nccl_network,
    unreachable_server,
)


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
    found = nccl_network({}, ["eth0", "hsn0", "hsn1"])
    assert [each.advice.split()[:2] for each in found] == [
        ["export", "NCCL_SOCKET_IFNAME=hsn0"],
        ["Load", "the"],
        ["export", "FI_MR_CACHE_MONITOR=userfaultfd,"],
    ]
    (tmp_path / "libnccl-net.so").touch()
    named = {"NCCL_SOCKET_IFNAME": "hsn", "LD_LIBRARY_PATH": f"/none:{tmp_path}", "FI_MR_CACHE_MONITOR": "kdreg2"}
    assert nccl_network(named, ["hsn0"]) == nccl_network({}, ["eth0"]) == nccl_network({}, []) == []


def test_a_launcher_behind_a_container_that_cleans_the_environment() -> None:
    (odd,) = hidden(Hidden("Slurm's srun", "4 processes", "starter-suid"))
    assert "Slurm's srun end at the process 'starter-suid'" in odd.text
    assert "--cleanenv" in odd.advice
    assert hidden(None) == []


def test_a_server_of_pmix_outside_of_the_network_of_a_container() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        uri = {"PMIX_SERVER_URI41": f"prterun-host-1@0.0;tcp4://127.0.0.1:{port}"}
        assert unreachable_server(uri, listening_ports()) == []
    (odd,) = unreachable_server(uri, {port + 1})
    assert odd.text == f"nobody listens at 127.0.0.1:{port}, which PMIX_SERVER_URI41 names"
    assert "--network=host" in odd.advice
    # Of another host this one does not know it.
    assert unreachable_server({"PMIX_SERVER_URI4": f"job@0.0;tcp4://10.0.0.1:{port}"}, ()) == []


def test_a_wrapper_that_closes_the_connection_to_the_launcher() -> None:
    closed = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_FD": "1000000"}
    (odd,) = closed_descriptor(closed)
    assert odd.text.startswith("PMI_FD=1000000 is not an open file, and MPICH's mpiexec")
    assert "close_fds=False" in odd.advice
    with open(os.devnull) as file:
        assert closed_descriptor({**closed, "PMI_FD": str(file.fileno())}) == []
    # An mpirun of Open MPI inside of such a job does not use it.
    assert closed_descriptor({**closed, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}) == []
    assert closed_descriptor({"PMI_FD": "1000000"}) == []


def test_nothing_is_odd_in_a_job_of_mpirun() -> None:
    assert look_around({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, gpus=False) == ()


def test_two_ranks_are_tried_with_what_is_called_by_name_and_its_flags_for_the_library() -> None:
    plain, whole = (Mpirun("/pals/bin/mpiexec", "PALS", "1.4", flags) for flags in ((), ("--pmi=pmix",)))
    other = Mpirun("/usr/bin/srun", "srun", "24.11", ())
    assert Launchers(plain, whole).tried is whole
    assert Launchers(plain, other).tried is plain
    assert Launchers(None, other).tried is other
    assert Launchers(plain, None).tried is plain
