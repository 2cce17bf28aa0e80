"""python -m hvlike bench, as a user starts it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.job import MODULE, job_environment, run_job

from hvlike.bench.allreduce import RATIOS

pytestmark = pytest.mark.in_turn(2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_json_has_every_contestant_and_ratio(ranks: int, output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of(f"allreduce, {ranks}"))
    assert found["ranks"] == ranks
    assert [each["bytes"] for each in found["results"]] == [1024, 300 << 10]
    for each in found["results"]:
        floors = {"read-write pass", "pass, shared", "memcpy"}
        assert set(each["seconds"]) == {"hvlike", "empty_shared", "MPI_Allreduce", "gloo", *floors}
        absent = {"Horovod/hvlike", "NCCL/hvlike", "MPI/bare", "hvlike/bare", "hvlike/exchange"}  # on one node
        assert set(each["ratios"]) == set(RATIOS) - absent
        assert all(len(summary["samples"]) == 3 for summary in each["seconds"].values())


def test_averages_of_other_dtypes_as_a_table_that_is_printed_once_and_a_picture(
    output_of: Callable[[str], str], folder: Path
) -> None:
    pytest.importorskip("matplotlib")
    output = output_of("averages")
    assert output.count("allreduce of one tensor, op average, in place, 2 ranks on 1 node(s)") == 1
    for line in (
        "300 KiB",
        "Without gloo: left out by --no-gloo.",
        "warm caches",
        "bfloat16 ratios",
        "float64 ratios",
        "it reduces the same values in float32",
    ):
        assert line in output
    assert (folder / "allreduce.png").read_bytes().startswith(b"\x89PNG")


def test_a_bare_loop_takes_part_in_what_numpy_computes(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("allreduce, bare"))
    for each in found["results"]:
        assert ("bare loop" in each["seconds"]) is (each["dtype"] != "bfloat16")
        assert ("hvlike/bare" in each["ratios"]) is (each["dtype"] != "bfloat16")


def test_a_bare_loop_is_for_two_ranks() -> None:
    job = run_job(MODULE, 1, args=["bench", "allreduce", "--no-gloo", "--bare"])
    assert job.returncode != 0
    assert "--bare is for two ranks on one node of x86 cores; there are 1 ranks" in job.stderr


def test_step_in_json(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("step, 3"))
    assert found["ranks"] == 3
    (result,) = found["results"]
    assert (result["model"], result["tensors"], result["bytes"]) == ("small", 16, 4 * 8 * (256 * 256 + 256))
    assert set(result["seconds"]) == {"no communication", "hvlike", "hvlike DDP", "DDP-gloo", "DDP-gloo view"}
    assert set(result["overhead"]) == {"hvlike", "hvlike DDP", "DDP-gloo", "DDP-gloo view"}
    assert set(result["ratios"]) == {"hvlike/hvlike DDP", "hvlike/DDP-gloo", "hvlike/DDP-gloo view"}
    assert all(len(summary["samples"]) == 2 for summary in result["seconds"].values())


def test_steps_with_a_bare_loop(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("step, bare"))
    for result in found["results"]:
        assert set(result["ratios"]) == {"hvlike/hvlike DDP", "hvlike/bare loop"}


def test_step_as_table_and_picture(output_of: Callable[[str], str], folder: Path) -> None:
    pytest.importorskip("matplotlib")
    output = output_of("step")
    assert output.count("training step, float32, SGD, 2 ranks on 1 node(s)") == 1
    assert "Without gloo: left out by --no-ddp." in output
    assert "Without Horovod: left out by --no-horovod." in output
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


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
    assert "'many' is not a size" in wrong.stderr


def test_one_rank_has_no_communication_to_measure() -> None:
    alone = command("bench", "step", "--models", "small")
    assert alone.returncode == 2
    assert "one rank does not communicate" in alone.stderr
    assert "mpirun -n 2" in alone.stderr
