"""DistributedDataParallel in a distributed backward: the context's gradients are averages when backward() returns."""

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvlike.nn import DistributedDataParallel, allreduce_hook

ROWS, WIDTH = 20, 4


class Table:
    """A table of vectors on one worker; sparse gradients."""

    def __init__(self) -> None:
        self.layer = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) / 10)

    def look_up(self, words: Tensor) -> Tensor:
        return self.layer(words)

    def gradient(self, context: int) -> Tensor:
        from hvlike.autograd import get_gradients

        return get_gradients(context)[self.layer.weight].to_dense()


def filled(module: nn.Module, seed: int) -> nn.Module:
    """The module with known values; RPCs that make modules meanwhile draw from the common generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def make_dense() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 2)).double(), 3)


def words_of(step: int) -> Tensor:
    """All ranks' words, (12, 3)."""
    return torch.randint(ROWS, (12, 3), generator=torch.Generator().manual_seed(step))


@pytest.fixture
def together(hvd: ModuleType) -> Iterator[None]:
    """No rank begins before all have ended the test before, nor ends before all have ended this one."""
    hvd.barrier()
    yield
    hvd.barrier()


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("mode", ["fast", "safe", "smart"])
@pytest.mark.parametrize("kind", ["plain", "find unused", "hook"])
def test_dense_layers_on_all_ranks_and_a_table_on_one(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, mode: str, kind: str
) -> None:
    rank, size = hvd.rank(), hvd.size()
    table = rpc.remote(0, Table)
    dense = make_dense()
    ddp = DistributedDataParallel(dense, find_unused_parameters=kind == "find unused")
    if kind == "hook":
        ddp.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))
    alone_table, alone = Table(), make_dense()
    for step in range(3):
        words = words_of(step)
        alone.zero_grad()
        alone_table.layer.zero_grad()
        alone(alone_table.look_up(words)).square().mean().backward()
        # What is in .grad from elsewhere stays there.
        kept = {parameter: torch.full_like(parameter, rank) for parameter in dense.parameters()}
        for parameter, value in kept.items():
            parameter.grad = value
        with autograd.context() as context:
            vectors = table.rpc_sync().look_up(words[rank::size])
            autograd.backward(context, [ddp(vectors).square().mean()], mode=mode)
            gradients = autograd.get_gradients(context)
            for parameter, other in zip(dense.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(gradients[parameter], other.grad)
                assert parameter.grad is kept[parameter]
                assert torch.equal(kept[parameter], torch.full_like(parameter, rank))
            part = table.rpc_sync().gradient(context)
            total = hvd.allreduce(part, name="table")
            torch.testing.assert_close(total, alone_table.layer.weight.grad.to_dense())


@pytest.mark.usefixtures("together")
def test_around_everything_and_a_part_of_it(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    """Local layers, remote ones in the middle, and local ones again, each in a module of its own."""
    rank, size = hvd.rank(), hvd.size()
    middle = rpc.remote((rank + 1) % size, nn.Linear, args=(4, 4))
    first, last, remote = (filled(nn.Linear(4, outputs), seed) for seed, outputs in enumerate((4, 2, 4)))
    middle.rpc_sync().load_state_dict(remote.state_dict())
    ddps = [DistributedDataParallel(each) for each in (first, last)]
    x = torch.randn(6 * size, 4, generator=torch.Generator().manual_seed(4))
    networks = [copy.deepcopy(each) for each in (first, remote, last)]
    nn.Sequential(*networks)(x).square().mean().backward()
    for _ in range(2):
        with autograd.context() as context:
            inner = middle.rpc_sync().forward(ddps[0](x[rank::size]))
            autograd.backward(context, [ddps[1](inner).square().mean()])
            gradients = autograd.get_gradients(context)
            for module, other in ((first, networks[0]), (last, networks[2])):
                for parameter, expected in zip(module.parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(gradients[parameter], expected.grad)


class Branches(nn.Module):
    """Uses the layers it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: filled(nn.Linear(2, 2), ord(name)) for name in "abc"})

    def forward(self, x: Tensor, used: str) -> Tensor:
        for name in used:
            x = self.layers[name](x)
        return x


@pytest.mark.usefixtures("together")
def test_sparse_gradients(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    """A table in the data-parallel part, below a remote module."""
    rank, size = hvd.rank(), hvd.size()
    module = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
    ddp = DistributedDataParallel(module)
    remote = rpc.RemoteModule(f"worker{(rank + 1) % size}", nn.Linear, (4, 1))
    for step in range(2):
        words = words_of(step)[rank::size]
        with autograd.context() as context:
            autograd.backward(context, [remote(ddp(words)).sum()])
            gradient = autograd.get_gradients(context)[module.weight]
            scale = hvd.allgather(remote.remote_parameters()[0].to_here().detach())
        assert gradient.is_sparse
        expected = torch.zeros(ROWS, 4)
        for other in range(size):
            # What each rank's words have got is the weight of the remote module it uses.
            for word in words_of(step)[other::size].flatten().tolist():
                expected[word] += scale[other] / size
        torch.testing.assert_close(gradient.to_dense(), expected)


@pytest.mark.usefixtures("together")
def test_unused_parameters(hvd: ModuleType, autograd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    module, alone = Branches(), Branches()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    alone(torch.ones(1, 2), "ab").sum().backward()
    for _ in range(2):
        with autograd.context() as context:
            autograd.backward(context, [ddp(torch.ones(1, 2), "ab" if rank == 0 else "a").sum()])
            gradients = autograd.get_gradients(context)
        assert module.layers["c"].bias not in gradients
        torch.testing.assert_close(gradients[module.layers["b"].bias], alone.layers["b"].bias.grad / size)
        assert module.layers["b"].bias.grad is None


@pytest.mark.usefixtures("together")
def test_accumulation_in_one_context_and_passes_of_both_kinds(hvd: ModuleType, autograd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    module = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(module)
    x = torch.full((1, 1), float(rank))
    mean = (size - 1) / 2
    with autograd.context() as context:
        with ddp.no_sync():
            autograd.backward(context, [ddp(x).sum()])
        assert autograd.get_gradients(context)[module.weight] == rank
        autograd.backward(context, [ddp(x).sum()])
        torch.testing.assert_close(autograd.get_gradients(context)[module.weight], torch.full((1, 1), 2 * mean))
        autograd.backward(context, [ddp(x).sum()])
        torch.testing.assert_close(autograd.get_gradients(context)[module.weight], torch.full((1, 1), 3 * mean))
    assert module.weight.grad is None
    ddp(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.full((1, 1), mean))


@pytest.mark.usefixtures("together")
def test_fewer_micro_batches_on_some_trainers(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    """The first half of the trainers has half of the batches; in a Join context."""
    rank, size = hvd.rank(), hvd.size()
    table = rpc.remote(0, Table)
    dense = make_dense()
    ddp = DistributedDataParallel(dense)
    counts = [1 if each < size // 2 else 2 for each in range(size)]
    found: list[dict[Tensor, Tensor]] = []
    with ddp.join():
        for batch in range(counts[rank]):
            with autograd.context() as context:
                vectors = table.rpc_sync().look_up(words_of(batch)[rank::size])
                autograd.backward(context, [ddp(vectors).square().mean()])
                found.append(autograd.get_gradients(context))
    for batch, gradients in enumerate(found):
        alone, alone_table = make_dense(), Table()
        for other in range(size):
            if counts[other] > batch:
                part = alone_table.look_up(words_of(batch)[other::size])
                (alone(part).square().mean() / size).backward()
        for parameter, expected in zip(dense.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(gradients[parameter], expected.grad)


class Failing(torch.autograd.Function):
    """Fails in backward where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ZeroDivisionError("on purpose")
        return gradient, None


@pytest.mark.usefixtures("together")
def test_a_backward_that_fails_on_one_rank(hvd: ModuleType, autograd: ModuleType) -> None:
    """The others get zeros of it when it goes on, which says so."""
    rank = hvd.rank()
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    ddp = DistributedDataParallel(module)
    with autograd.context() as context:
        result = ddp(Failing.apply(torch.ones(1, 1, requires_grad=True), rank == 0))
        if rank == 0:
            with pytest.raises(RuntimeError, match="on purpose"):
                autograd.backward(context, [result.sum()])
            with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
                ddp(torch.ones(1, 1))
        else:
            autograd.backward(context, [result.sum()])
    with autograd.context() as context:
        autograd.backward(context, [ddp(torch.ones(1, 1)).sum()])
        assert autograd.get_gradients(context)[module[0].weight] == 1
