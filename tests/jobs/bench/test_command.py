"""python -m hvlike bench, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.job import MODULE, job_environment, run_job

from hvlike.bench.allreduce import RATIOS

QUICK = ["bench", "allreduce", "--sizes", "1KiB,300KiB", "--repetitions", "3"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_json_has_every_contestant_and_ratio(ranks: int) -> None:
    job = run_job(MODULE, ranks, args=[*QUICK, "--json"]).check()
    found = json.loads(job.stdout)
    assert found["ranks"] == ranks
    assert [each["bytes"] for each in found["results"]] == [1024, 300 << 10]
    for each in found["results"]:
        floors = {"read-write pass", "pass, shared", "memcpy"}
        assert set(each["seconds"]) == {"hvlike", "empty_shared", "MPI_Allreduce", "gloo", *floors}
        assert set(each["ratios"]) == set(RATIOS) - {"Horovod/hvlike", "NCCL/hvlike", "MPI/bare", "hvlike/bare"}
        assert all(len(summary["samples"]) == 3 for summary in each["seconds"].values())


def test_averages_of_other_dtypes_as_a_table_that_is_printed_once_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "allreduce.png"
    options = ["--dtypes", "bfloat16,float64", "--op", "average", "--warm", "--no-gloo", "--plot", str(picture)]
    job = run_job(MODULE, 2, args=[*QUICK, *options]).check()
    assert job.stdout.count("allreduce of one tensor, op average, in place, 2 ranks on 1 node(s)") == 1
    for line in (
        "300 KiB",
        "Without gloo: left out by --no-gloo.",
        "warm caches",
        "bfloat16 ratios",
        "float64 ratios",
        "it reduces the same values in float32",
    ):
        assert line in job.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bare_loop_takes_part_in_what_numpy_computes() -> None:
    options = ["--bare", "--no-gloo", "--op", "average", "--dtypes", "float32,float64,bfloat16", "--json"]
    found = json.loads(run_job(MODULE, 2, args=[*QUICK, *options]).check().stdout)
    for each in found["results"]:
        assert ("bare loop" in each["seconds"]) is (each["dtype"] != "bfloat16")
        assert ("hvlike/bare" in each["ratios"]) is (each["dtype"] != "bfloat16")


def test_a_bare_loop_is_for_two_ranks() -> None:
    job = run_job(MODULE, 3, args=[*QUICK, "--bare"])
    assert job.returncode != 0
    assert "--bare is for two ranks on one node of x86 cores; there are 3 ranks" in job.stderr


STEP = ["bench", "step", "--models", "small", "--repetitions", "2"]


def test_step_in_json() -> None:
    ranks = 3
    job = run_job(MODULE, ranks, args=[*STEP, "--bucket-view", "--json"]).check()
    found = json.loads(job.stdout)
    assert found["ranks"] == ranks
    (result,) = found["results"]
    assert (result["model"], result["tensors"], result["bytes"]) == ("small", 16, 4 * 8 * (256 * 256 + 256))
    assert set(result["seconds"]) == {"no communication", "hvlike", "hvlike DDP", "DDP-gloo", "DDP-gloo view"}
    assert set(result["overhead"]) == {"hvlike", "hvlike DDP", "DDP-gloo", "DDP-gloo view"}
    assert set(result["ratios"]) == {"hvlike/hvlike DDP", "hvlike/DDP-gloo", "hvlike/DDP-gloo view"}
    assert all(len(summary["samples"]) == 2 for summary in result["seconds"].values())


def test_steps_with_a_bare_loop() -> None:
    options = ["--no-ddp", "--bare", "--json"]
    found = json.loads(run_job(MODULE, 2, args=[*STEP, *options]).check().stdout)
    for result in found["results"]:
        assert set(result["ratios"]) == {"hvlike/hvlike DDP", "hvlike/bare loop"}


def test_step_as_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "step.png"
    job = run_job(MODULE, 2, args=[*STEP, "--no-ddp", "--no-horovod", "--plot", str(picture)]).check()
    assert job.stdout.count("training step, float32, SGD, 2 ranks on 1 node(s)") == 1
    assert "Without gloo: left out by --no-ddp." in job.stdout
    assert "Without Horovod: left out by --no-horovod." in job.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "hvlike", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=job_environment({}))


def test_wrong_commands_say_what_there_is() -> None:
    assert "bench" in command().stdout
    unknown = command("walk")
    assert unknown.returncode == 2
    assert "no command 'walk'" in unknown.stderr
    wrong = command("bench", "allreduce", "--sizes", "many")
    assert wrong.returncode == 2
    assert "'many' is no size" in wrong.stderr
