"""The shorter examples run on two ranks and print what they promise."""

import re

import pytest
from support.job import CHECKOUT, run_job

EXAMPLES = CHECKOUT / "examples"

pytestmark = pytest.mark.timeout(300)


def test_both_clipping_recipes_train_alike() -> None:
    outputs = [
        run_job(EXAMPLES / "gradient_clipping.py", 2, args=["--epochs", "2", "--recipe", recipe], timeout=140)
        .check()
        .stdout
        for recipe in ("helper", "explicit")
    ]
    assert outputs[0] == outputs[1]
    assert re.search(r"epoch 2: loss [\d.]+, clipped [1-9]\d* of 23 steps", outputs[0])


def test_one_rank_overflows_and_all_skip() -> None:
    output = (
        run_job(EXAMPLES / "mixed_precision.py", 2, args=["--epochs", "2", "--overflow-at", "3"], timeout=140)
        .check()
        .stdout
    )
    assert "scale 512" in output
    assert output.splitlines()[-1] == "largest difference between ranks: 0.0"


def test_the_benchmark_reports_rates() -> None:
    small = (
        "--model resnet18 --image-size 32 --batch-size 2 --num-iters 2 --num-batches-per-iter 1 --num-warmup-batches 1"
    )
    output = run_job(EXAMPLES / "synthetic_benchmark.py", 2, args=[*small.split(), "--fp16-allreduce"]).check().stdout
    assert "Iter #1:" in output
    assert re.search(r"Img/sec per CPU: [\d.]+ \+-[\d.]+\nTotal img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+\n", output)
