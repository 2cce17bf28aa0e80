"""The models of bench step: as many tensors and elements as they claim, a gradient for each, seeds that repeat."""

import math

import pytest
import torch

from hvlike.bench.trainers import WORKLOADS, bert, resnet_50, small

LIGHT = ["transformer", "small", "tensors400"]


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
    sizes = {name: sum(each.nbytes for each in WORKLOADS[name].model(0).parameters()) for name in ("mlp", *LIGHT)}
    assert sizes["mlp"] == 4 * 4 * (2048 * 2048 + 2048)
    assert round(sizes["transformer"] / 2**20) == 13
    assert sizes["small"] == 4 * 8 * (256 * 256 + 256)
