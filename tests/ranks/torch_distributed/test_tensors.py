"""Every collective takes tensors as they are: views, strides, requires_grad, inference mode, empty, 0-dim, large."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from support.torch_distributed.backend import BACKEND, World, beyond_gloo
from support.torch_distributed.values import mine
from torch import Tensor

SHAPE = (2, 3, 4, 4)
Layout = Callable[[Tensor], Tensor]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 3).contiguous().transpose(1, 3)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def every_second(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -7.0)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def behind_an_offset(tensor: Tensor) -> Tensor:
    memory = torch.full((tensor.numel() + 5,), -7.0)
    return memory[3:-2].view(tensor.shape).copy_(tensor)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(tensor.clone())


LAYOUTS = {
    "contiguous": torch.clone,
    "transposed": transposed,
    "channels_last": channels_last,
    "every_second": every_second,
    "behind_an_offset": behind_an_offset,
    "leaf": leaf,
    "parameter": parameter,
}
OF_STRIDES = ("transposed", "channels_last", "every_second")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Case:
    """One collective, on tensors of a layout: run() and whether everything is right then."""

    def __init__(self, world: World, layout: Layout, shape: tuple[int, ...] = SHAPE) -> None:
        self.world, self.layout, self.shape = world, layout, shape
        self.values = [mine(rank, *shape) for rank in range(world.size)]
        self.mine = self.make(self.values[world.rank])

    def make(self, tensor: Tensor) -> Tensor:
        made = self.layout(tensor)
        assert torch.equal(made, tensor)
        return made

    def empty(self) -> Tensor:
        return self.make(torch.zeros(self.shape))

    def all_reduce(self) -> bool:
        dist.all_reduce(self.mine)
        return torch.equal(self.mine, sum(self.values))

    def reduce(self) -> bool:
        dist.reduce(self.mine, 0)
        return self.world.rank > 0 or torch.equal(self.mine, sum(self.values))

    def broadcast(self) -> bool:
        dist.broadcast(self.mine, 0)
        return torch.equal(self.mine, self.values[0])

    def all_gather(self) -> bool:
        outputs = [self.empty() for _ in self.values]
        dist.all_gather(outputs, self.mine)
        return all(torch.equal(a, b) for a, b in zip(outputs, self.values, strict=True))

    def gather(self) -> bool:
        outputs = [self.empty() for _ in self.values] if self.world.rank == 0 else None
        dist.gather(self.mine, outputs)
        return outputs is None or all(torch.equal(a, b) for a, b in zip(outputs, self.values, strict=True))

    def scatter(self) -> bool:
        output = self.empty()
        dist.scatter(output, [self.make(each) for each in self.values] if self.world.rank == 0 else None)
        return torch.equal(output, self.values[self.world.rank])

    def reduce_scatter(self) -> bool:
        output = self.empty()
        dist.reduce_scatter(output, [self.make(each + self.world.rank) for each in self.values])
        return torch.equal(output, sum(self.values[self.world.rank] + rank for rank in range(self.world.size)))

    def all_to_all(self) -> bool:
        outputs = [self.empty() for _ in self.values]
        dist.all_to_all(outputs, [self.make(each + self.world.rank) for each in self.values])
        return all(torch.equal(each, self.values[self.world.rank] + rank) for rank, each in enumerate(outputs))


LISTS = [name for name in vars(Case) if name not in ("make", "empty") and not name.startswith("_")]


def refuses(collective: str, layout: str) -> bool:
    """What gloo does not take, or fills wrongly."""
    return BACKEND == "gloo" and (layout in OF_STRIDES or (layout in ("leaf", "parameter")))


@contextmanager
def recording(layout: str) -> Iterator[None]:
    """Outputs that require grad are written outside of autograd, as programs do."""
    with torch.no_grad() if layout in ("leaf", "parameter") else nullcontext():
        yield


@each_layout
@pytest.mark.parametrize("collective", LISTS)
def test_tensors_of_any_layout(world: World, collective: str, layout: str) -> None:
    if refuses(collective, layout):
        pytest.skip("gloo wants contiguous tensors")
    with recording(layout):
        case = Case(world, LAYOUTS[layout])
        assert getattr(case, collective)()


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_leaves_that_require_grad_need_no_mode(world: World, collective: str) -> None:
    """torch's backends write into tensors unseen by autograd."""
    case = Case(world, leaf)
    assert getattr(case, collective)()
    assert case.mine.is_leaf
    assert case.mine.grad_fn is None


@beyond_gloo
@pytest.mark.parametrize("collective", LISTS)
def test_every_rank_has_its_own_strides(world: World, collective: str) -> None:
    """Values count, not their order in memory."""
    layouts = [torch.clone, channels_last, every_second, transposed]
    case = Case(world, layouts[world.rank % len(layouts)])
    assert getattr(case, collective)()


def test_what_lies_beside_a_view_stays(world: World) -> None:
    memory = torch.full((10,), -7.0)
    dist.all_reduce(memory[3:6].copy_(mine(world.rank, 3)))
    assert memory[:3].tolist() == [-7.0] * 3
    assert memory[6:].tolist() == [-7.0] * 4
    matrix = torch.full((4, 4), -7.0)
    if BACKEND != "gloo":
        dist.broadcast(matrix[:, 1], 0)
        dist.all_gather([matrix[:, place % 4] for place in range(world.size)], torch.full((4,), float(world.rank)))
        assert matrix[:, : world.size].tolist() == [list(map(float, range(world.size)))] * 4
        assert (matrix[:, world.size :] == -7).all()


def test_gathered_into_parts_of_one_tensor(world: World) -> None:
    """FSDP's way: each rank's input is the part of the output that is its own."""
    output = torch.zeros(world.size, 5)
    part = output[world.rank]
    part.copy_(mine(world.rank, 5))
    dist.all_gather_into_tensor(output.view(-1), part)
    assert torch.equal(output, torch.stack([mine(rank, 5) for rank in range(world.size)]))

    rows = torch.cat([mine(world.rank, 5)] * world.size)
    mine_of_it = rows.view(world.size, 5)[world.rank]
    dist.reduce_scatter_tensor(mine_of_it, rows)
    assert torch.equal(mine_of_it, sum(mine(rank, 5) for rank in range(world.size)))


@pytest.mark.parametrize("collective", LISTS)
def test_inference_mode(world: World, collective: str) -> None:
    with torch.inference_mode():
        assert getattr(Case(world, torch.clone), collective)()
    with torch.inference_mode():
        case = Case(world, torch.clone)
    if collective in ("all_reduce", "broadcast"):
        # An inference tensor outside of the mode.
        assert getattr(case, collective)()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
@pytest.mark.parametrize("collective", LISTS)
def test_empty_and_0_dim_tensors(world: World, collective: str, shape: tuple[int, ...]) -> None:
    case = Case(world, torch.clone, (1,))
    case.shape = shape
    case.values = [torch.full(shape, float(rank + 1)) for rank in range(world.size)]
    case.mine = case.values[world.rank].clone()
    if BACKEND == "gloo" and 0 in shape:
        pytest.skip("gloo refuses empty tensors here and there")
    assert getattr(case, collective)()


def test_empty_and_0_dim_tensors_of_single_forms(world: World) -> None:
    output = torch.zeros(world.size)
    dist.all_gather_into_tensor(output, torch.tensor([float(world.rank)]))
    assert output.tolist() == list(map(float, range(world.size)))
    if BACKEND != "gloo":
        dist.all_gather_into_tensor(output.zero_(), torch.tensor(float(world.rank)))
        assert output.tolist() == list(map(float, range(world.size)))
        dist.all_gather_into_tensor(torch.zeros(0, 3), torch.zeros(0, 3))
        dist.reduce_scatter_tensor(torch.zeros(0), torch.zeros(0))
        scalar = torch.zeros(())
        dist.reduce_scatter_tensor(scalar, torch.arange(float(world.size)))
        assert scalar == world.rank * world.size
    dist.all_to_all_single(torch.zeros(0, 2), torch.zeros(0, 2), [0] * world.size, [0] * world.size)


@pytest.mark.parametrize("collective", LISTS)
def test_thirty_mebibytes(world: World, collective: str) -> None:
    """In several tensors where a collective takes a list."""
    parts = 1 if collective in ("all_reduce", "reduce", "broadcast") else world.size
    assert getattr(Case(world, torch.clone, (30 * 2**18 // parts + 1,)), collective)()


def test_thirty_mebibytes_in_single_forms(world: World) -> None:
    count = 30 * 2**18 // world.size + 3
    output = torch.zeros(world.size, count)
    dist.all_gather_into_tensor(output.view(-1), torch.full((count,), float(world.rank)))
    assert all((row == rank).all() for rank, row in enumerate(output))
    part = torch.zeros(count)
    dist.reduce_scatter_tensor(part, output.view(-1))
    assert (part == world.rank * world.size).all()
    exchanged = torch.zeros_like(output)
    dist.all_to_all_single(exchanged, output)
    assert (exchanged == world.rank).all()


def test_results_are_written_where_the_caller_wants_them(world: World) -> None:
    tensor, outputs = mine(world.rank, 5), [torch.zeros(5) for _ in range(world.size)]
    places = [each.data_ptr() for each in (tensor, *outputs)]
    dist.all_reduce(tensor)
    dist.all_gather(outputs, tensor)
    assert [each.data_ptr() for each in (tensor, *outputs)] == places
