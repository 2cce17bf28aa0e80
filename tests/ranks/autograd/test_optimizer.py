"""rpc.DistributedOptimizer moves parameters as a local optimizer with the same gradients does, and says what fails."""

import pickle
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hvlike
from hvlike.errors import UsageError

CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adagrad, {"lr": 0.05}),
    (optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (optim.SGD, {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    (optim.Rprop, {"lr": 0.05}),
]


class Matrix:
    """A weight with what multiplies by it."""

    def __init__(self, seed: int = 0, requires_grad: bool = True) -> None:
        values = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed))
        self.weight = values.requires_grad_(requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight @ inputs

    def get_weight(self) -> Tensor:
        return self.weight

    def get_grad(self) -> Tensor | None:
        return self.weight.grad

    def set_grad(self, value: float) -> None:
        self.weight.grad = torch.full((3, 3), value)


def weights_of(modules: list[Any]) -> list[Tensor]:
    """Read through RPC, as the owners have them now."""
    return [module.rpc_sync().get_weight().detach() for module in modules]


def chain(forwards: list[Any], step: int) -> Tensor:
    """What the modules make of the inputs of a step, one after the other."""
    values = torch.rand(3, 3, generator=torch.Generator().manual_seed(100 + step))
    for forward in forwards:
        values = forward(values)
    return values.sum()


def local_run(optimizer_class: Any, arguments: dict[str, Any], steps: int) -> list[list[Tensor]]:
    """The weights after each step of one process."""
    modules = [Matrix(0), Matrix(1), Matrix(2, False)]
    optimizer = optimizer_class([module.weight for module in modules], **arguments)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward([chain([module.forward for module in modules], step)])
        optimizer.step()
        found.append([module.weight.detach().clone() for module in modules])
    return found


@pytest.mark.parametrize(("optimizer_class", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_equal_to_the_local_optimizer(
    rpc: ModuleType, autograd: ModuleType, optimizer_class: Any, arguments: dict[str, Any]
) -> None:
    """Two weights on other workers, and one that requires no gradient."""
    rank, size = rpc.get_worker_info().id, hvlike.size()
    owners = [(rank + 1) % size, (rank + 2) % size, (rank + 1) % size]
    modules = [rpc.remote(owner, Matrix, (place, place < 2)) for place, owner in enumerate(owners)]
    start = weights_of(modules)
    optimizer = rpc.DistributedOptimizer(
        optimizer_class, [module.remote().get_weight() for module in modules], **arguments
    )
    for step, expected in enumerate(local_run(optimizer_class, arguments, steps=2)):
        with autograd.context() as context_id:
            autograd.backward(context_id, [chain([module.rpc_sync().forward for module in modules], step)])
            optimizer.step(context_id)
            torch.testing.assert_close(weights_of(modules), expected)
    assert [torch.equal(*pair) for pair in zip(start, weights_of(modules), strict=True)] == [False, False, True]


def test_several_parameters_of_one_owner_and_those_of_this_worker(rpc: ModuleType, autograd: ModuleType) -> None:
    rank, size = rpc.get_worker_info().id, hvlike.size()
    modules = [rpc.remote((rank + place // 2) % size, Matrix, (place,)) for place in range(6)]
    own = torch.ones(3, 3, requires_grad=True)
    rrefs = [module.remote().get_weight() for module in modules]
    optimizer = rpc.DistributedOptimizer(optim.SGD, [*rrefs, rpc.RRef(own)], lr=0.5)
    assert len(optimizer.remote_optimizers) == min(size, 3)
    start = weights_of(modules)
    with autograd.context() as context_id:
        total = torch.stack([module.rpc_sync().forward(torch.eye(3)) for module in modules]).sum() + (2 * own).sum()
        autograd.backward(context_id, [total])
        optimizer.step(context_id)
        for before, after in zip(start, weights_of(modules), strict=True):
            assert torch.equal(after, before - 0.5)
    assert torch.equal(own.detach(), torch.zeros(3, 3))


def test_gradients_of_the_past_do_not_move_a_parameter(rpc: ModuleType, autograd: ModuleType) -> None:
    """What lies in .grad, momentum and weight decay would move it; `.grad` is afterwards what it was before."""
    rank, size = rpc.get_worker_info().id, hvlike.size()
    used, idle = (rpc.remote((rank + 1) % size, Matrix, (seed,)) for seed in range(2))
    rrefs = [module.remote().get_weight() for module in (used, idle)]
    optimizer = rpc.DistributedOptimizer(optim.SGD, rrefs, lr=0.1, momentum=0.9, weight_decay=0.1)
    with autograd.context() as context_id:
        outputs = idle.rpc_sync().forward(used.rpc_sync().forward(torch.eye(3)))
        autograd.backward(context_id, [outputs.sum()])
        optimizer.step(context_id)
    assert idle.rpc_sync().get_grad() is None
    idle.rpc_sync().set_grad(7.0)
    before = weights_of([used, idle])
    with autograd.context() as context_id:
        autograd.backward(context_id, [used.rpc_sync().forward(torch.eye(3)).sum()])
        optimizer.step(context_id)
    after = weights_of([used, idle])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    assert torch.equal(idle.rpc_sync().get_grad(), torch.full((3, 3), 7.0))


def test_a_step_before_any_backward_moves_nothing(rpc: ModuleType, autograd: ModuleType) -> None:
    """Also for an owner that the context has not reached, and from a thread without a context."""
    rank, size = rpc.get_worker_info().id, hvlike.size()
    module = rpc.remote((rank + 1) % size, Matrix)
    optimizer = rpc.DistributedOptimizer(optim.Adam, [module.remote().get_weight()])
    before = weights_of([module])
    with autograd.context() as context_id:
        thread = threading.Thread(target=optimizer.step, args=(context_id,))
        thread.start()
        thread.join()
        optimizer.step(context_id)
    assert torch.equal(weights_of([module])[0], before[0])


def test_parameters_of_modules_and_sparse_gradients(rpc: ModuleType, autograd: ModuleType) -> None:
    rank, size = rpc.get_worker_info().id, hvlike.size()
    table = rpc.RemoteModule(f"rank:{(rank + 1) % size}", make_table)
    optimizer = rpc.DistributedOptimizer(optim.SparseAdam, table.remote_parameters(), lr=0.1)
    alone = make_table()
    local: Any = optim.SparseAdam(alone.parameters(), lr=0.1)
    rows = torch.tensor([1, 1, 4])
    with autograd.context() as context_id:
        autograd.backward(context_id, [table(rows).square().sum()])
        optimizer.step(context_id)
    torch.autograd.backward([alone(rows).square().sum()])
    local.step()
    found = table.get_module_rref().to_here().weight
    torch.testing.assert_close(found, alone.weight)
    assert torch.equal(found[[0, 2, 3]], make_table().weight[[0, 2, 3]])


def make_table() -> torch.nn.Embedding:
    values = torch.rand(5, 2, generator=torch.Generator().manual_seed(3))
    return torch.nn.Embedding(5, 2, _weight=values, sparse=True)


THREADS = 3
STEPS = 4


class Server:
    """The parameters, on one worker."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        # A product would keep the weight for backward, and torch would see that others have changed it.
        return (self.weight + inputs) * inputs.detach()

    def get_weight(self) -> Tensor:
        return self.weight


class Alone(optim.SGD):
    """Sees whether another step of this worker runs at the same time."""

    running = 0
    most = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Alone.running += 1
        Alone.most = max(Alone.most, Alone.running)
        # Others that wait for their turn would come in now.
        time.sleep(0.001)
        super().step()
        Alone.running -= 1


def most_at_once() -> int:
    return Alone.most


def test_every_step_counts_once(rpc: ModuleType, autograd: ModuleType) -> None:
    rank, size = rpc.get_worker_info().id, hvlike.size()
    server = rpc._all_gather(rpc.RRef(Server()) if rank == 0 else None)["worker0"]
    barrier = threading.Barrier(THREADS)

    def train(thread: int) -> None:
        optimizer = rpc.DistributedOptimizer(Alone, [server.remote().get_weight()], lr=1.0)
        gradient = torch.full((4,), float(rank * THREADS + thread))
        barrier.wait()
        for _ in range(STEPS):
            with autograd.context() as context_id:
                autograd.backward(context_id, [server.rpc_sync().forward(gradient).sum()])
                optimizer.step(context_id)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, range(THREADS)))
    rpc._barrier()
    total = STEPS * sum(range(size * THREADS))
    assert torch.equal(server.rpc_sync().get_weight().detach(), torch.full((4,), -float(total)))
    assert rpc.rpc_sync(0, most_at_once) == 1
    rpc._barrier()


ended: list[str] = []
"""What optimizers of this worker have come to the end of."""


class Failing(optim.SGD):
    """Fails on the workers it is told to, at once; on the others it takes its time. what: __init__ or step."""

    def __init__(self, parameters: Iterable[Tensor], what: str, ranks: list[int]) -> None:
        super().__init__(parameters, lr=1.0)
        self.what, self.ranks = what, ranks
        self.act("__init__")

    def act(self, now: str) -> None:
        if now == self.what:
            if hvlike.rank() in self.ranks:
                raise ValueError(f"{now} fails on {hvlike.rank()}")
            time.sleep(0.1)
            ended.append(now)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.act("step")
        super().step()


def make_weight(requires_grad: bool = True) -> Tensor:
    return torch.ones(2, requires_grad=requires_grad)


def make_non_leaf() -> Tensor:
    return 2 * make_weight()


def ended_here() -> list[str]:
    return ended


def times(weight: Any, factor: Tensor) -> Tensor:
    product: Tensor = weight.local_value() * factor
    return product


def has_grad(weight: Any) -> bool:
    return weight.local_value().grad is not None


@pytest.fixture
def forget(rpc: ModuleType) -> Iterator[None]:
    """A test begins with an empty record on all workers."""
    ended.clear()
    rpc._barrier()
    yield
    rpc._barrier()


def first(rpc: ModuleType) -> bool:
    """Rank 0 tests, the others serve until the fixture's shutdown."""
    return bool(rpc.get_worker_info().id == 0)


def weights(rpc: ModuleType) -> list[Any]:
    """A weight on each worker."""
    return [rpc.remote(rank, make_weight) for rank in range(hvlike.size())]


@pytest.mark.usefixtures("forget")
def test_a_constructor_that_fails_on_one_owner(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        last = hvlike.size() - 1
        with pytest.raises(ValueError, match=f"__init__ fails on {last}"):
            rpc.DistributedOptimizer(Failing, weights(rpc), "__init__", [last])
        assert [rpc.rpc_sync(rank, ended_here) for rank in range(last)] == [["__init__"]] * last
        assert rpc.rpc_sync(last, ended_here) == []


@pytest.mark.mpi(min_size=2)
def test_a_constructor_that_fails_on_several_owners(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        with pytest.raises(ValueError, match=r"2 of \d owners failed") as caught:
            rpc.DistributedOptimizer(Failing, weights(rpc), "__init__", ranks=[0, 1])
        for rank in (0, 1):
            assert f"worker{rank} (rank {rank}) could not make its optimizer" in str(caught.value)
            assert f"__init__ fails on {rank}" in str(caught.value)


@pytest.mark.usefixtures("forget")
def test_a_step_that_fails_on_one_owner(rpc: ModuleType, autograd: ModuleType) -> None:
    """The others have stepped, and the one that failed can be used again."""
    if first(rpc):
        last = hvlike.size() - 1
        parameters = weights(rpc)
        failing = rpc.DistributedOptimizer(Failing, parameters, "step", [last])
        good = rpc.DistributedOptimizer(optim.SGD, parameters, lr=1.0)
        with autograd.context() as context_id:
            factor = torch.full((2,), 4.0)
            outputs = [rpc.rpc_sync(rank, times, (weight, factor)) for rank, weight in enumerate(parameters)]
            autograd.backward(context_id, [torch.stack(outputs).sum()])
            with pytest.raises(ValueError, match=f"step fails on {last}"):
                failing.step(context_id)
            assert [weight.to_here()[0].item() for weight in parameters] == [-3.0] * last + [1.0]
            assert [rpc.rpc_sync(rank, ended_here) for rank in range(last)] == [["step"]] * last
            assert not any(rpc.rpc_sync(rank, has_grad, (weight,)) for rank, weight in enumerate(parameters))
            good.step(context_id)
            assert [weight.to_here()[0].item() for weight in parameters] == [-7.0] * last + [-3.0]


def test_unknown_contexts(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        parameters = weights(rpc)
        optimizer = rpc.DistributedOptimizer(optim.SGD, parameters, lr=1.0)
        with autograd.context() as released:
            pass
        for context_id in (released, 12345):
            with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
                optimizer.step(context_id)
        for wrong in ("1", None, True):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                optimizer.step(wrong)
        assert [weight.to_here()[0].item() for weight in parameters] == [1.0] * hvlike.size()


def test_what_is_refused(rpc: ModuleType, autograd: ModuleType) -> None:
    if first(rpc):
        last = hvlike.size() - 1
        with pytest.raises(UsageError, match=r"params_rref\[1\] must be an RRef of a parameter, got Tensor"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.RRef(make_weight()), make_weight()], lr=1.0)
        with pytest.raises(UsageError, match="empty parameter list"):
            rpc.DistributedOptimizer(optim.SGD, [], lr=1.0)
        with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.remote(last, make_non_leaf)], lr=1.0)
        with pytest.raises(TypeError, match="nothing"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.remote(last, make_weight)], nothing=1.0)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            rpc.DistributedOptimizer(optim.SGD, [rpc.remote(last, make_weight)], lr=-1.0)
        with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
            rpc.DistributedOptimizer(lambda parameters: optim.SGD(parameters), [rpc.remote(last, make_weight)])
