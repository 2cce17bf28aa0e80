"""Options of the benchmarks: what is wrong is refused before MPI starts, with what there is."""

import argparse

import pytest
import torch

from hvlike.bench import allreduce, command, step
from hvlike.bench.harness.benchmark import positive, positives
from hvlike.bench.trainers import DEFAULT
from hvlike.errors import UsageError


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


def test_numbers_of_repetitions() -> None:
    assert positive("3") == 3
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a whole number above 0"):
            positive(wrong)
    assert positives("1,20") == [1, 20]
