"""The report shows every check with its verdict and what to do, to people and to programs."""

import json

import pytest
from support.doctor.healthy import case, rank

import hvlike
from hvlike.doctor import command
from hvlike.doctor.command import main
from hvlike.doctor.job import Case
from hvlike.doctor.probe import Gap

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


def test_a_healthy_report_ends_well() -> None:
    healthy = case()
    assert command.as_text(healthy, command.run_checks(healthy)).endswith("nothing stands in the way of a job")


@pytest.mark.parametrize(("given", "ok"), [(case(), True), (BROKEN, False)])
def test_programs_read_the_same(given: Case, ok: bool) -> None:
    answer = json.loads(command.as_json(given, command.run_checks(given)))
    assert (answer["ok"], answer["ranks"], answer["nodes"]) == (ok, 2, 1)
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
