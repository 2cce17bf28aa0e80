"""The examples of torch.distributed over hvlike: each ends where one process ends that does the same alone."""

import re
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(300)

NAMES = ["ddp_unmodified", "fsdp2", "tensor_parallel", "pipeline, 1f1b", "pipeline, gpipe"]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_one_process_does(output_of: Callable[[str], str], name: str) -> None:
    output = output_of(name)
    (difference,) = re.findall(r"largest difference to one process: (.+)", output)
    assert float(difference) < 1e-12
    first, *_, last = (float(each) for each in re.findall(r": loss ([\d.]+)", output))
    assert last < first


def test_the_ranks_share_the_work(output_of: Callable[[str], str]) -> None:
    assert "2 rank(s), backend hvlike" in output_of("ddp_unmodified")
    kept = re.findall(r"rank \d keeps (\d+) of (\d+)", output_of("fsdp2"))
    assert sum(int(mine) for mine, _ in kept) == int(kept[0][1])
    assert "3 rank(s), each keeps [64, 48] of [192, 48]" in output_of("tensor_parallel")
    assert len(re.findall(r"rank \d has parts", output_of("pipeline, gpipe"))) == 3
