"""Options of the benchmarks, refused before MPI starts if wrong; processes that help, and the models of bench step."""

import argparse
import math
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from hvlike.bench import allreduce, command, step
from hvlike.bench.harness.processes import Helpers
from hvlike.bench.trainers import DEFAULT, WORKLOADS, bert, resnet_50, small
from hvlike.errors import LaunchError, UsageError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("allreduce --sizes many", "'many' is not a size"),
        ("allreduce --dtypes half", "there is no dtype 'half'; there are float32, "),
        ("allreduce --op max", "invalid choice: 'max'"),
        ("allreduce --repetitions 0", "'0' is not a whole number above 0"),
        ("step --models alexnet", "there is no model 'alexnet'; there are mlp, "),
        ("drawing", "invalid choice: 'drawing'"),
    ],
)
def test_what_is_wrong_is_named(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(line.split())
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_picture_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    with pytest.raises(SystemExit):
        command.main(["step", "--plot", "found.pdf"])
    assert "found.pdf" in capsys.readouterr().err


def test_no_averages_of_integers() -> None:
    with pytest.raises(UsageError, match="--op average is for floating dtypes"):
        command.main(["allreduce", "--dtypes", "int32", "--op", "average"])


def test_defaults() -> None:
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    options = parser.parse_args(["--dtypes", "bfloat16,int64"])
    assert options.dtypes == [torch.bfloat16, torch.int64]
    assert options.sizes[0] == 1 << 10
    assert options.sizes[-1] == 400 << 20
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    assert [each.name for each in parser.parse_args([]).models] == list(DEFAULT)


def test_small_sizes_are_repeated_more_often() -> None:
    counts = [allreduce.default_repetitions(size) for size in (0, 1 << 10, 25 << 20, 100 << 20, 1 << 32)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (60, 9)


ECHO = """
import sys
from multiprocessing.connection import Connection
from hvlike.bench.harness.processes import requests
end = Connection(int(sys.argv[1]))
for request in requests(end):
    end.send({"seen": request})
    if request == "die":
        sys.exit("out of cake")
"""


def start(helpers: Helpers, program: str) -> Connection:
    ours, theirs = Pipe()
    with theirs:
        helpers.start([sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    helpers.ends.append(ours)
    return ours


def test_a_helper_answers_until_it_dies_which_is_named_with_its_last_output() -> None:
    helpers = Helpers("the echo")
    end = start(helpers, ECHO)
    assert helpers.ask(end, {"n": 1}) == {"seen": {"n": 1}}
    assert helpers.ask(end, "die") == {"seen": "die"}
    with pytest.raises(LaunchError, match=r"the echo: .*; the last output:\nout of cake"):
        helpers.ask(end)
    helpers.close()


LIGHT = ["small", "tensors400"]


def elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_shapes_of_published_networks() -> None:
    assert (len(resnet_50()), elements(resnet_50())) == (161, 25_557_032)
    assert (len(bert(768, 12)), elements(bert(768, 12))) == (199, 109_482_240)
    assert (len(bert(1024, 24)), elements(bert(1024, 24))) == (391, 335_141_888)


def test_small_tensors_have_1_to_16_kibibytes() -> None:
    assert [4 * elements([shape]) >> 10 for shape in small(6)] == [1, 2, 4, 8, 16, 1]
    assert len(small(400)) == 400


@pytest.mark.parametrize("name", LIGHT)
def test_every_parameter_gets_a_gradient_that_depends_on_the_data(name: str) -> None:
    workload = WORKLOADS[name]
    found = []
    for seed in (1, 2):
        model = workload.model(0)
        model(*workload.data(seed)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", LIGHT)
def test_seeds_repeat(name: str) -> None:
    workload = WORKLOADS[name]
    for one, again in zip(workload.model(3).parameters(), workload.model(3).parameters(), strict=True):
        assert torch.equal(one, again)
    assert all(map(torch.equal, workload.data(3), workload.data(3)))


def test_sizes_that_the_specification_names() -> None:
    sizes = {
        name: sum(each.nbytes for each in WORKLOADS[name].model(0).parameters())
        for name in ("mlp", "transformer", "small")
    }
    assert sizes["mlp"] == 4 * 4 * (2048 * 2048 + 2048)
    assert round(sizes["transformer"] / 2**20) == 13
    assert sizes["small"] == 4 * 8 * (256 * 256 + 256)
