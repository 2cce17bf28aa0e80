"""The local part of a backward: what it emits when, what it runs in one go, what it frees, what an error leaves.

While a worker waits it looks through its graph: what the next backward does is the same with and without it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.autograd.local_world import Listener, LocalWorld
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from hvlike.autograd.context import DistributedContext, new_send
from hvlike.autograd.engine import SegmentRecord
from hvlike.autograd.local_backward import LocalBackward

F64 = torch.float64


def leaf_of(value: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.full((2,), value, dtype=dtype, requires_grad=True)


def kinds(local: LocalBackward) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(segment.kind, segment.sends, segment.recvs) for segment in local.segments]


def edge_and_one(root: Tensor) -> Any:
    return get_gradient_edge(root), torch.ones_like(root)


class Alone:
    """One worker's backward, with what it has emitted."""

    def __init__(
        self, world: LocalWorld, roots: Sequence[Tensor], rank: int = 0, *, sends: Sequence[int] | None = None
    ) -> None:
        self.emitted: list[tuple[int, list[Any] | None]] = []
        edges = [edge_and_one(root) for root in roots]
        self.local = LocalBackward(world.workers[rank], edges, self._emit, listener=Listener())
        if sends is not None:
            self.reached = list(self.local.reach(None))
            self.reached += self.local.reach(sends)
        self.local.engage(sends)

    def is_done(self) -> bool:
        return self.local.finished

    def _emit(self, recv: int, rank: int, gradients: Any) -> None:
        plain: list[Any] | None = gradients and [
            None if gradient is None else gradient.tolist() for gradient in gradients
        ]
        self.emitted.append((recv, plain))


def test_where_nothing_was_sent_all_runs_in_one_segment() -> None:
    world = LocalWorld()
    ours = world.carry_one(leaf_of(1.0), 1, 0)
    here = Alone(world, [(ours * leaf_of(3.0)).sum()])
    assert not here.emitted
    here.local.step()
    assert here.emitted == [(1, [[3.0, 3.0]])]
    assert here.is_done()
    assert kinds(here.local) == [("final", (), (1,))]
    here.local.step()
    assert len(here.local.segments) == 1


def test_a_recv_that_is_not_reached_is_emitted_at_once() -> None:
    world = LocalWorld()
    world.carry_one(leaf_of(1.0), 1, 0)
    assert Alone(world, [leaf_of(1.0).sum()]).emitted == [(1, None)]


def test_a_recv_that_is_reached_by_what_gets_no_gradient_gives_nones() -> None:
    world = LocalWorld()
    ours = world.carry([leaf_of(1.0), leaf_of(2.0)], 1, 0)
    world.carry_one(ours[0] * 2, 0, 1)
    here = Alone(world, [leaf_of(1.0).sum()])
    assert not here.emitted
    here.local.step()
    assert not here.is_done()
    here.local.resolve(2, None)
    here.local.step()
    assert here.is_done()
    assert here.emitted == [(1, [None, None])]


def test_what_can_run_does_not_wait_for_what_cannot() -> None:
    world, leaf = LocalWorld(), leaf_of(2.0)
    sent = leaf * 3
    world.carry_one(sent, 0, 1)
    back = world.carry_one(leaf_of(1.0), 1, 0)
    here = Alone(world, [back.sum()])
    here.local.step()
    assert here.emitted == [(2, [[1.0, 1.0]])]
    assert not here.is_done()
    here.local.resolve(1, [torch.tensor([4.0, 5.0], dtype=F64)])
    here.local.step()
    assert here.is_done()
    assert world.workers[0].gradients[leaf].tolist() == [12.0, 15.0]
    assert kinds(here.local) == [("plain", (), (2,)), ("final", (1,), ())]


def test_answers_that_are_unknown_or_come_again_are_ignored() -> None:
    world, leaf = LocalWorld(), leaf_of(2.0)
    world.carry_one(leaf, 0, 1)
    here = Alone(world, [leaf.sum()])
    for _ in range(2):
        here.local.resolve(99, [torch.ones(2)])
        here.local.resolve(1, [torch.ones(2, dtype=F64)])
        here.local.step()
    assert world.workers[0].gradients[leaf].tolist() == [2.0, 2.0]


def test_it_waits_only_for_the_sends_it_was_told_of() -> None:
    world, leaf = LocalWorld(), leaf_of(2.0)
    world.carry_one(leaf * 2, 0, 1)
    world.carry_one(leaf * 3, 0, 1)
    here = Alone(world, [leaf.sum()], sends=[2])
    here.local.resolve(1, [torch.ones(2, dtype=F64)])
    here.local.step()
    assert not here.is_done()
    here.local.resolve(2, [torch.ones(2, dtype=F64)])
    here.local.step()
    assert here.is_done()
    assert world.workers[0].gradients[leaf].tolist() == [4.0, 4.0]


def test_marked_sends_and_the_roots_lead_to_recvs() -> None:
    world, leaf = LocalWorld(), leaf_of(2.0)
    first, second = world.carry_one(leaf_of(1.0), 1, 0), world.carry_one(leaf_of(1.0), 1, 0)
    world.carry_one(first * leaf, 0, 1)
    root = second.sum()
    here = Alone(world, [root], sends=[3])
    assert here.reached == [2, 1]
    here.local.step()
    here.local.resolve(3, [torch.ones(2, dtype=F64)])
    here.local.step()
    assert here.emitted == [(2, [[1.0, 1.0]]), (1, [[2.0, 2.0]])]
    assert world.workers[0].gradients[leaf].tolist() == [1.0, 1.0]


def test_sparse_gradients_stay_sparse() -> None:
    world = LocalWorld()
    table = torch.ones(5, 2, dtype=F64, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True)
    again = torch.nn.functional.embedding(torch.tensor([0]), table, sparse=True)
    back = world.carry_one(world.carry_one(rows, 0, 1) * 2, 1, 0)
    root = back.sum() + again.sum()
    for times in (1, 2):
        world.backward([root], retain_graph=True)
        gradient = world.workers[0].gradients[table]
        assert gradient.is_sparse
        assert gradient.to_dense()[:, 0].tolist() == [1.0 * times, 4.0 * times, 0.0, 2.0 * times, 0.0]


class Box:
    """Holds a tensor that autograd saves; gone when autograd has let go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("retain_graph", [False, True])
def test_saved_tensors_are_freed_unless_the_graph_is_retained(retain_graph: bool) -> None:
    world, boxes = LocalWorld(), list[Any]()

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor.detach())
        boxes.append(weakref.ref(box))
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        start = leaf_of(1.0).exp()
        back = world.carry_one(world.carry_one(start, 0, 1).sin(), 1, 0)
        root = (back * start).sum()
    world.backward([root], retain_graph=retain_graph)
    assert len(boxes) == 4
    assert all((box() is not None) == retain_graph for box in boxes)


def test_nothing_is_kept_of_the_graph() -> None:
    world = LocalWorld()
    sent = leaf_of(1.0) * 2
    back = world.carry_one(world.carry_one(sent, 0, 1) * 3, 1, 0)
    root = back.sum()
    world.backward([root])
    nodes = [weakref.ref(value) for value in (sent, back, root)]
    passes, world.passes = world.passes, []
    del world, sent, back, root
    assert [node() for node in nodes] == [None] * 3
    assert [len(local.segments) for local in passes] == [2, 1]


def test_an_error_of_user_code_leaves_nothing_behind() -> None:
    """The graph has a boundary and the recv is below what fails, so the error comes in the middle of everything."""
    world, leaf, far = LocalWorld(), leaf_of(2.0), leaf_of(3.0)
    failing = [True]

    def fail(gradient: Tensor) -> None:
        if failing[0]:
            raise ArithmeticError("not now")

    here, own = world.carry_one(far * 1, 1, 0), leaf * 1
    back = world.carry_one(world.carry_one(own, 0, 1) * 2, 1, 0)
    product = here * own
    below: Any = here
    below.register_hook(fail)
    root = product.sum() + back.sum()
    for _ in range(5):
        for each in world.workers:
            each.gradients.clear()
        with pytest.raises(ArithmeticError, match="not now"):
            world.backward([root], retain_graph=True)
        assert not any(local.finished for local in world.passes[:1])
        assert all(recv.deliver is None for each in world.workers for recv in each.recvs.values())
        node: Any = product.grad_fn
        probe = node.register_hook(lambda *_: None)
        assert len(probe.hooks_dict_ref()) == 1
        probe.remove()
    failing[0] = False
    for each in world.workers:
        each.gradients.clear()
    for times in (1, 2):
        world.backward([root], retain_graph=True)
        assert world.workers[0].gradients[leaf].tolist() == [5.0 * times] * 2
        assert world.workers[1].gradients[far].tolist() == [2.0 * times] * 2


def test_segments_tell_what_ran() -> None:
    world, leaf = LocalWorld(), leaf_of(2.0)
    back = world.carry_one(world.carry_one(leaf * 3, 0, 1), 1, 0)
    world.backward([back.sum()])
    first, second = world.passes[0].segments
    assert (first.kind, first.nodes, first.leaves) == ("plain", 2, 0)
    assert (second.kind, second.nodes, second.leaves) == ("final", 2, 1)
    assert first.start <= first.end <= second.start <= second.end
    assert isinstance(first, SegmentRecord)


def send(context: DistributedContext, message: int, tensor: Tensor) -> None:
    context.record_send(new_send(message, 1, "test", [tensor]))


def backward(context: DistributedContext, answers: dict[int, float]) -> None:
    """One that was begun elsewhere: all sends are answered, those that are not here are not waited for."""
    with context.lock:
        local = LocalBackward(context, [], lambda *_: None, listener=Listener())
        for message in local.engage(None):
            local.resolve(message, [torch.full((2,), answers[message], dtype=F64)])
            local.step()
    assert local.finished


def test_after_a_scan_ahead_the_next_backward_has_all_sends() -> None:
    context, leaf = DistributedContext(1), leaf_of(2.0)
    # Additions keep nothing that the first backward would free.
    shared = leaf + 1
    send(context, 1, shared + 0)
    context.scan_ahead()
    backward(context, {1: 1.0})
    send(context, 2, shared + 1)
    context.scan_ahead()
    backward(context, {1: 10.0, 2: 100.0})
    assert context.gradients[leaf].tolist() == [111.0, 111.0]


def test_what_was_withdrawn_after_a_scan_ahead_is_not_waited_for() -> None:
    context, leaf = DistributedContext(1), leaf_of(2.0)
    (came,) = context.record_recv(1, 1, [leaf_of(1.0)])
    below = came * leaf
    send(context, 2, below * 1)
    send(context, 3, below * 5)
    context.scan_ahead()
    context.withdraw(3)
    send(context, 4, leaf * 7)
    context.scan_ahead()
    emitted: list[int] = []
    with context.lock:
        local = LocalBackward(context, [], lambda recv, rank, gradients: emitted.append(recv), listener=Listener())
        local.engage(None)
        local.resolve(2, [torch.ones(2, dtype=F64)])
        local.step()
    # While the gradient of the other send is missing: nothing of what was withdrawn is in the way.
    assert emitted == [1]


def test_a_hook_that_is_registered_after_a_scan_ahead_runs() -> None:
    context, leaf = DistributedContext(1), leaf_of(2.0)
    product: Any = leaf * 3
    send(context, 1, product)
    context.scan_ahead()
    node = product.grad_fn.next_functions[0][0]
    seen: list[list[float]] = []
    node.register_hook(lambda inner, outer: seen.append(outer[0].tolist()))
    backward(context, {1: 1.0})
    assert seen == [[3.0, 3.0]]


def test_a_scan_ahead_waits_for_nobody() -> None:
    context = DistributedContext(1)
    send(context, 1, leaf_of(2.0) * 3)
    with context.lock:
        other = threading.Thread(target=context.scan_ahead)
        other.start()
        other.join()
        assert context.ahead is None
    context.scan_ahead()
    assert context.ahead is not None
