"""What is read from files and variables, what is odd around a rank, and the report on it for people and programs."""

import json
import mmap
import os
import socket
from pathlib import Path

import pytest
from support.doctor.healthy import case, rank

import hvlike
from hvlike.doctor import command, gpus, launching, machine, software
from hvlike.doctor.command import main
from hvlike.doctor.job import Case
from hvlike.doctor.probe import Gap
from hvlike.launch import trial
from hvlike.launch.trial import Launchers
from hvlike.transport.host.find_mpirun import Mpirun
from hvlike.transport.host.launcher_table import HYDRA, UNKNOWN
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


def test_the_settings_are_read() -> None:
    seen = launching.collect_settings(
        {"HOROVOD_CPU_OPERATIONS": "MPI", "HVLIKE_OVERLAP": "perhaps", "HVLIKE_TIMELIN": "x"}
    )
    ignored, unknown = seen.useless
    assert ignored.startswith("HOROVOD_CPU_OPERATIONS is ignored: ")
    assert unknown == "HVLIKE_TIMELIN is set, but there is no such setting: did you mean HVLIKE_TIMELINE?"
    assert "HVLIKE_OVERLAP" in seen.refused
    assert launching.collect_settings({}) == launching.Settings("", ())


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
    assert "No such file" in machine.collect_temporary_files().wrong
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert machine.collect_temporary_files().wrong == ""
    assert list(tmp_path.iterdir()) == []


def test_how_hvlike_shares_memory_is_seen_in_the_map(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    for text, expected in (("", None), ("7f /memfd:hvlike (deleted)", "memfd"), ("7f /dev/shm/hvlike-x", "/dev/shm")):
        path.write_text(text)
        assert machine.mapped_by_hvlike(path) == expected


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
    assert list(found.versions) == ["Python", "hvlike", "torch", "mpi4py"]
    assert "none" not in found.versions.values()


def test_a_launcher_that_starts_two_jobs_is_seen_through(tmp_path: Path) -> None:
    twice = tmp_path / "mpirun"
    twice.write_text("#!/bin/sh\necho ranks: 1\necho ranks: 1\necho some noise\n")
    twice.chmod(0o755)
    tried = trial.try_ranks(Mpirun(str(twice), HYDRA, "1", ()), 60)
    assert (tried.status, tried.sizes) == (0, (1, 1))
    assert tried.lines == ("ranks: 1", "ranks: 1", "some noise")


def test_a_launcher_that_hangs_is_stopped(tmp_path: Path) -> None:
    slow = tmp_path / "mpirun"
    slow.write_text("#!/bin/sh\nexec sleep 3600\n")
    slow.chmod(0o755)
    tried = trial.try_ranks(Mpirun(str(slow), UNKNOWN, "1", ()), 0.1)
    assert (tried.status, tried.sizes) == (None, ())


BROKEN = case(rank(memory=Gap("was given up after 20 s without an answer")), rank())


def test_a_check_is_a_line_with_what_to_do_below() -> None:
    text = command.as_text(BROKEN, command.run_checks(BROKEN))
    lines = text.splitlines()
    assert lines[0] == f"hvlike {hvlike.__version__} doctor: 2 ranks on 1 node"
    assert "  ok  software      Python 3.11.7, hvlike 1.0, torch 2.13.0+cpu, mpi4py 4.1.2" in lines
    start = next(index for index, line in enumerate(lines) if line.startswith("FAIL  shared memory"))
    assert lines[start].endswith("this step was given up after 20 s without an answer")
    assert lines[start + 1].lstrip().startswith("-> ")
    for name in command.CHECKS:
        assert any(line[6:].startswith(name) for line in lines)
    assert lines[-1].endswith("something must be repaired, see FAIL")
    assert max(map(len, lines)) <= 118


def test_a_job_on_very_many_hosts_fits_on_a_screen() -> None:
    ranks = tuple(rank(f"host{number}") for number in range(100))
    many = case(*ranks, nodes=tuple((number,) for number in range(100)))
    lines = command.as_text(many, command.run_checks(many)).splitlines()
    assert len(lines) < 150
    assert "... 76 lines more" in "\n".join(lines)
    checks = json.loads(command.as_json(many, command.run_checks(many)))["checks"]
    hosts = next(each for each in checks if each["check"] == "hosts")
    assert len(hosts["found"]) == 100


@pytest.mark.parametrize(("given", "ok"), [(case(), True), (BROKEN, False)])
def test_programs_read_the_same(given: Case, ok: bool) -> None:
    answer = json.loads(command.as_json(given, command.run_checks(given)))
    assert (answer["ok"], answer["ranks"], answer["nodes"]) == (ok, 2, 1)
    assert command.as_text(given, command.run_checks(given)).endswith("stands in the way of a job") == ok
    assert [each["check"] for each in answer["checks"]] == list(command.CHECKS)
    assert all(each["found"] for each in answer["checks"])
    assert {each["verdict"] for each in answer["checks"]} <= {"ok", "warn", "FAIL", "skip"}
    assert all(each["advice"] for each in answer["checks"] if each["verdict"] in ("warn", "FAIL"))


def test_a_rank_that_rank_0_cannot_hear_says_one_line() -> None:
    line = command.in_one_line(command.run_checks(BROKEN))
    assert line.startswith("FAIL shared memory: this step was given up after 20 s")
    assert "\n" not in line


def test_the_list_of_horovod(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert main(["--check-build"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["--check-build"]) == 0
    text = capsys.readouterr().out
    assert "    [ ] TensorFlow\n    [X] PyTorch\n    [ ] MXNet" in text
    assert "Available Controllers:\n    [X] MPI\n    [ ] Gloo" in text
    assert text.startswith(f"hvlike v{hvlike.__version__}:")
    assert f"    [{'X' if hvlike.nccl_built() else ' '}] NCCL" in text


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
