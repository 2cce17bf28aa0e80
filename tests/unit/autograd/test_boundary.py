"""Gradients where some children of a node are missing: none is lost or computed twice, no hook sees a part.

In each case of the table a worker has p from elsewhere and q of its own, which it has sent away; an operation on both
runs before the gradient of what was sent is back, so that p's gets on its way. The random programs, with gradients that
are delivered in random order, are those of local_programs: calls, results unused, diamonds, views, changes in place,
functions with several outputs and with none for an input, leaves used often, hooks that bend what they see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functions
from support.autograd.local_functions import none_for_right, sum_and_product
from support.autograd.local_programs import LocalProgram
from support.autograd.local_world import LocalWorld, OneProcess
from torch import Tensor

Operation = Callable[[Tensor, Tensor], Tensor]

F64 = torch.float64


def forward(world: LocalWorld, p: Tensor, q: Tensor, operation: Operation) -> Tensor:
    """The root: of the operation, and of what came back for q."""
    here = world.carry_one(p * 1, 1, 0)
    own = q * 1
    back = world.carry_one(world.carry_one(own, 0, 1) * 2, 1, 0)
    outcome = operation(here, own)
    outcome = outcome.abs() if outcome.is_complex() else outcome
    return (outcome * torch.linspace(1, 2, outcome.numel(), dtype=F64).view(outcome.shape)).sum() + back.sum().double()


def rectangle(rows: int = 3, columns: int = 3, dtype: torch.dtype = F64) -> Tensor:
    """Any values, positive ones."""
    torch.manual_seed(rows + columns)
    return torch.rand(rows, columns, dtype=dtype) + 0.5


def in_place(left: Tensor, right: Tensor) -> Tensor:
    """CopySlices."""
    outcome = left * 1
    outcome[0].mul_(right[0])
    return outcome


OPERATIONS: dict[str, Operation] = {
    "add": torch.add,
    "multiply": torch.mul,
    "divide": torch.div,
    "power": torch.pow,
    "broadcast": lambda left, right: left + right[0],
    "broadcast product": lambda left, right: left[:, :1] * right[0],
    "matrices": torch.mm,
    "addmm": lambda left, right: torch.addmm(left, left, right),
    "linear": lambda left, right: functions.linear(left, right, right[0]),
    "cat": lambda left, right: torch.cat([left, right, left]),
    "stack": lambda left, right: torch.stack([right, left]),
    "where": lambda left, right: torch.where(left > 1, left, right),
    "maximum": torch.maximum,
    "layer norm": lambda left, right: functions.layer_norm(left, (3,), right[0], right[1]),
    "convolution": lambda left, right: functions.conv1d(left[None], right[:, :, None]),
    "attention": lambda left, right: functions.scaled_dot_product_attention(left[None], right[None], left[None]),
    "prelu": lambda left, right: functions.prelu(left, right[0]),
    "index put": lambda left, right: left.index_put((torch.tensor([0, 0]),), right[:2], accumulate=True),
    "scatter": lambda left, right: left.scatter(1, torch.tensor([[0, 2, 1]] * 3), right),
    "lerp": lambda left, right: torch.lerp(left, right, left),
    "complex": torch.complex,
    "complex product": lambda left, right: torch.view_as_complex(left[:, :2].contiguous()) * right[0, 0],
    "in place": in_place,
    "einsum": lambda left, right: torch.einsum("ij,kj->ik", left, right),
    "distance": torch.cdist,
    "function": lambda left, right: sum_and_product(left, right)[1],
    "function with two outputs": lambda left, right: torch.cat(sum_and_product(left, right)),
    "function of a row": lambda left, right: sum_and_product(left[0], right[0])[0],
    "function that gives None": none_for_right,
}


def check_gradients(operation: Operation) -> None:
    """They are those of ordinary autograd, and the operation was a boundary."""
    world, p, q = LocalWorld(), rectangle().requires_grad_(), rectangle().requires_grad_()
    world.backward([forward(world, p, q, operation)])
    assert "selective" in [segment.kind for segment in world.passes[0].segments]
    twins = [leaf.detach().clone().requires_grad_() for leaf in (p, q)]
    torch.autograd.backward(forward(OneProcess(), twins[0], twins[1], operation))
    for worker, leaf, twin in ((1, p, twins[0]), (0, q, twins[1])):
        # None for a leaf that gets no gradient.
        torch.testing.assert_close(world.workers[worker].gradients.get(leaf), twin.grad)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_a_boundary(name: str, swapped: bool) -> None:
    operation = OPERATIONS[name]
    check_gradients((lambda left, right: operation(right, left)) if swapped else operation)


def test_gradients_have_the_dtype_of_their_place() -> None:
    world, p, q = LocalWorld(), rectangle().requires_grad_(), rectangle(dtype=torch.float32).requires_grad_()
    world.backward([forward(world, p, q, torch.mul)])
    assert world.workers[0].gradients[q].dtype is torch.float32
    torch.testing.assert_close(world.workers[0].gradients[q], p.detach().float() * weights().float() + 2)
    torch.testing.assert_close(world.workers[1].gradients[p], q.detach().double() * weights())


def weights() -> Tensor:
    return torch.linspace(1, 2, 9, dtype=F64).view(3, 3)


@pytest.mark.parametrize("operation", [torch.mul, lambda left, right: sum_and_product(left, right)[1]])
def test_hooks_of_a_boundary_and_around_it_run_once_with_all_there_is(operation: Operation) -> None:
    seen: dict[str, list[Any]] = {}

    def watch(value: Tensor, name: str) -> None:
        node: Any = value.grad_fn
        watch: Any = value.register_hook
        watch(lambda gradient: seen.setdefault(name, []).append(gradient.clone()))
        node.register_prehook(lambda outer: seen.setdefault(f"{name} before", []).append(outer))
        node.register_hook(lambda inner, outer: seen.setdefault(f"{name} after", []).append(inner))

    def bend(inner: tuple[Tensor, ...], outer: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(gradient.square() for gradient in inner)

    def watched(left: Tensor, right: Tensor) -> Tensor:
        watch(right, "q")
        outcome = operation(left, right)
        node: Any = outcome.grad_fn
        watch(outcome, "outcome")
        node.register_hook(bend)
        return outcome

    world, p, q = LocalWorld(), rectangle().requires_grad_(), rectangle().requires_grad_()
    root = forward(world, p, q, watched)
    for _ in range(2):
        seen.clear()
        world.backward([root], retain_graph=True)
        assert {name: len(calls) for name, calls in seen.items()} == dict.fromkeys(
            ["q", "q before", "q after", "outcome", "outcome before", "outcome after"], 1
        )
        of_outcome = [gradient for gradient in seen["outcome after"][0] if gradient is not None]
        assert len(of_outcome) == 2
        torch.testing.assert_close(of_outcome[0], q.detach() * weights())
        torch.testing.assert_close(of_outcome[1], p.detach() * weights())
        torch.testing.assert_close(seen["q"][0], (p.detach() * weights()) ** 2 + 2)
    torch.testing.assert_close(world.workers[1].gradients[p], 2 * (q.detach() * weights()) ** 2)


def test_hooks_see_gradients_of_the_shape_of_their_place() -> None:
    """The gradient of what was broadcast is summed before a hook sees it, which may not be linear."""

    def broadcast(left: Tensor, right: Tensor) -> Tensor:
        outcome = left + right[0]
        node: Any = outcome.grad_fn
        node.register_hook(lambda inner, outer: tuple(gradient.square() for gradient in inner))
        return outcome

    check_gradients(broadcast)


def test_one_blocked_child_leads_to_the_other() -> None:
    """Both are needed by what runs: captured together, the engine would run the one that leads to the other."""
    runs: list[Tensor] = []

    def residual(left: Tensor, right: Tensor) -> Tensor:
        block = right.tanh()
        watch: Any = block.register_hook
        watch(runs.append)
        return left * (right + block) * block

    check_gradients(residual)
    assert len(runs) == 2
    torch.testing.assert_close(runs[0], runs[1])


def test_nothing_stays_on_the_node() -> None:
    nodes: list[Any] = []

    def watched(left: Tensor, right: Tensor) -> Tensor:
        outcome = left * right
        nodes.append(outcome.grad_fn)
        return outcome

    def theirs(*_: object) -> None:
        """A hook of the user."""

    world, p, q = LocalWorld(), rectangle().requires_grad_(), rectangle().requires_grad_()
    root = forward(world, p, q, watched)
    (node,) = nodes
    kept = node.register_hook(theirs)
    world.backward([root])
    hooks, prehooks = kept.hooks_dict_ref(), node.register_prehook(theirs).hooks_dict_ref()
    assert list(hooks.values()) == [theirs]
    assert list(prehooks.values()) == [theirs]
    kept.remove()
    assert not hooks


PROGRAMS = 60
"""In CI; thousands were run by hand."""

GROUPS = 4


@pytest.mark.parametrize("group", range(GROUPS))
def test_gradients_are_those_of_ordinary_autograd(group: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(group, PROGRAMS, GROUPS):
        kinds += compare(seed)
    assert kinds.keys() == {"plain", "selective", "final"}


def compare(seed: int) -> Counter[str]:
    """Run one program both ways, backward once to three times; return the kinds of segments."""
    size, steps, times = 2 + seed % 3, 10 + seed % 30, 1 + seed % 3
    world, alone = LocalWorld(size, seed), OneProcess(size, seed)
    program, expected = LocalProgram(world, seed, steps), LocalProgram(alone, seed, steps)
    kinds: Counter[str] = Counter()
    for time in range(times):
        alone.backward(expected.roots, retain_graph=time < times - 1)
        world.backward(program.roots, retain_graph=time < times - 1)
        kinds.update(segment.kind for local in world.passes for segment in local.segments)
    for (rank, leaf), (_, twin) in zip(program.leaves, expected.leaves, strict=True):
        assert_same(world.workers[rank].gradients.get(leaf), twin.grad)
        # retain_grad does nothing for leaves.
        assert leaf.grad is None
    for value, twin in zip(program.retained, expected.retained, strict=True):
        if not value.is_leaf:
            assert_same(value.grad, twin.grad)
    assert program.counts == expected.counts
    return kinds


def assert_same(gradient: Tensor | None, expected: Tensor | None) -> None:
    if expected is None or gradient is None:
        assert gradient is expected
    else:
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
