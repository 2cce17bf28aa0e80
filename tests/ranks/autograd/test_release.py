"""The end of a context: here at once, soon on all workers that it has reached, and no message brings it back."""

import gc
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.autograd.sights import here, is_known
from support.rpc.doors import open_door, pass_door, wait_for

import hvlike.autograd
import hvlike.rpc
from hvlike.autograd.contexts import RELEASE, WITHDRAW, Contexts, rank_of_id

UNKNOWN = "Could not find autograd context with id: "


def pass_on(context: int, to: int) -> list[bool]:
    """Whether the context is known here and on the next worker, called in it."""
    return [is_known(context), hvlike.rpc.rpc_sync(to, is_known, (context,))]


def call_when_open(door: str, to: int, tensor: torch.Tensor) -> tuple[int, bool, bool]:
    """Wait, then call another worker: the context here, whether it is known there, whether what came is a leaf."""
    pass_door(door)
    doubled = hvlike.rpc.rpc_sync(to, torch.mul, (tensor, 2))
    return here(), hvlike.rpc.rpc_sync(to, is_known, (here(),)), doubled.is_leaf


class Told:
    """An agent that only writes down what it is given."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.hearers: dict[int, Any] = {}
        self.notices: list[tuple[int, int, tuple[int, int]]] = []
        self.when_lost: list[Any] = []
        self.fabric = SimpleNamespace(recorder=SimpleNamespace(on=False))

    def hear(self, kind: int, hearer: Any) -> None:
        self.hearers[kind] = hearer

    def notify(self, rank: int, kind: int, value: tuple[int, int]) -> None:
        self.notices.append((rank, kind, value))

    def post(self, rank: int, kind: int, value: tuple[int, int], storages: list[Any]) -> None:
        assert not storages
        self.notify(rank, kind, value)

    def submit(self, work: Any) -> None:
        work()


def worker(rank: int) -> tuple[Contexts, Any]:
    """The contexts of a worker, and its agent."""
    contexts, agent = Contexts(), Told(rank)
    contexts.begin(agent)  # type: ignore[arg-type]
    return contexts, agent


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


_seen: dict[int, list[weakref.ref[torch.Tensor]]] = {}
"""Tensors of this worker, by the context that they belong to."""


def see(context: int, tensors: Iterable[torch.Tensor]) -> None:
    _seen.setdefault(context, []).extend(map(weakref.ref, tensors))


def halved(tensor: torch.Tensor) -> torch.Tensor:
    """Half of it; the product that autograd keeps is seen."""
    product = tensor * tensor
    see(here(), [product])
    return product / tensor / 2


def all_are_gone(context: int) -> bool:
    """Whether nothing refers to what was seen of it here any more."""
    return all(tensor() is None for tensor in _seen[context])


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cyclic garbage stays: on all ranks, as all run the test."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("mode", ["safe", "smart", "fast"])
@pytest.mark.parametrize("ending", ["as usual", "by an error"])
def test_what_a_backward_has_held_does_not_wait_for_the_garbage_collector(
    rpc: ModuleType, autograd: ModuleType, peer: int, mode: str, ending: str
) -> None:
    with autograd.context() as context:
        local = halved(leaf())
        root = rpc.rpc_sync(peer, halved, (local,)).sum()
        if ending == "as usual":
            autograd.backward(context, [root], mode=mode)
            see(context, autograd.get_gradients(context).values())
        else:
            local.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(RuntimeError, match="division by zero"):
                autograd.backward(context, [root], mode=mode)
    assert len(_seen[context]) > 0
    del local, root
    wait_for(partial(all_are_gone, context))
    wait_for(lambda: rpc.rpc_sync(peer, all_are_gone, (context,)))


@pytest.mark.parametrize("ending", ["as usual", "by an exception"])
def test_a_context_goes_here_at_once_and_soon_on_all_workers_that_it_has_reached(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, ending: str
) -> None:
    beyond = (peer + 1) % hvd.size()
    fetched = rpc.remote(peer, torch.ones, (2,))
    try:
        with autograd.context() as another:
            # No call runs there in the context: the value is only fetched.
            fetched.to_here()
            raise KeyError("of the program")
    except KeyError:
        pass
    try:
        with autograd.context() as context:
            assert rpc.rpc_sync(peer, pass_on, (context, beyond)) == [True, True]
            if ending == "by an exception":
                raise KeyError("of the program")
    except KeyError:
        pass
    with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context}$"):
        autograd.get_gradients(context)
    for rank, over in ((peer, another), (peer, context), (beyond, context)):
        wait_for(lambda rank=rank, over=over: not rpc.rpc_sync(rank, is_known, (over,)))


def test_what_goes_on_in_a_released_context_does_not_bring_it_back(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door, beyond = f"released {hvd.rank()}", (peer + 1) % hvd.size()
    with autograd.context() as context:
        goes_on = rpc.rpc_async(peer, call_when_open, (door, beyond, leaf()))
    wait_for(lambda: not rpc.rpc_sync(peer, is_known, (context,)))
    rpc.rpc_sync(peer, open_door, (door,))
    assert goes_on.wait() == (context, False, True)
    assert not rpc.rpc_sync(peer, is_known, (context,))


def test_an_answer_that_comes_after_the_release_is_not_attached(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"after {hvd.rank()}"
    with autograd.context() as context:
        future = rpc.rpc_async(peer, pass_door, (door, leaf()))
    rpc.rpc_sync(peer, open_door, (door,))
    arrived = future.wait()
    assert arrived.requires_grad
    assert arrived.is_leaf
    with pytest.raises(RuntimeError, match=UNKNOWN):
        autograd.get_gradients(context)


def test_contexts_end_with_the_session(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        rpc.rpc_sync(peer, torch.add, (leaf(), 1))
        rpc.shutdown(timeout=60)
        with pytest.raises(RuntimeError, match=UNKNOWN):
            autograd.get_gradients(context)
        rpc.init_rpc(f"worker{hvd.rank()}")
        with pytest.raises(RuntimeError, match=UNKNOWN):
            autograd.get_gradients(context)
        # The thread is still in a context that is no more: its messages are as those of none.
        assert rpc.rpc_sync(peer, torch.add, (leaf(), 1)).is_leaf
    with autograd.context() as another:
        assert another != context


def test_a_released_context_leaves_nothing_behind(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    kept = torch.ones(3, requires_grad=True) * 2
    node = weakref.ref(kept)
    with autograd.context() as context:
        arrived = rpc.rpc_sync(peer, torch.add, (kept, 1))
        send = weakref.ref(next(iter(hvlike.autograd.contexts.contexts.find(context).sends.values())))
    del kept, arrived
    # Nothing of it is in a cycle.
    assert node() is None
    assert send() is None
    gc.collect()


@pytest.mark.pure
def test_a_release_names_the_context_and_the_oldest_that_lives() -> None:
    contexts, agent = worker(1)
    first, second, third = (contexts.create() for _ in range(3))
    for each in (first, second, third):
        contexts.sent(each.id, 2, "", ())
    contexts.release(second)
    contexts.release(first)
    contexts.release(third)
    assert agent.notices == [
        (2, RELEASE, (second.id, first.id)),
        (2, RELEASE, (first.id, third.id)),
        (2, RELEASE, (third.id, third.id + 1)),
    ]


@pytest.mark.pure
def test_a_release_is_passed_on_once_to_who_does_not_know() -> None:
    context = 2 << 48
    contexts, agent = worker(1)
    contexts.came((context, 0), 2, ())
    for rank in (0, 1, 2, 3, 4):
        contexts.sent(context, rank, "", ())
    agent.hearers[RELEASE](3, (context, context + 1))
    agent.hearers[RELEASE](0, (context, context + 1))
    assert sorted(agent.notices) == [(0, RELEASE, (context, context + 1)), (4, RELEASE, (context, context + 1))]
    assert contexts.live() == []


@pytest.mark.pure
def test_a_release_that_overtakes_messages_keeps_the_context_away() -> None:
    context = 2 << 48
    contexts, agent = worker(1)
    agent.hearers[RELEASE](2, (context, context))
    # Nor does one come back to its creator.
    made = contexts.create()
    contexts.release(made)
    contexts.came((made.id, 0), 3, ())
    tensors = [leaf()]
    assert contexts.came((context, 7), 2, tensors) is tensors
    assert tensors[0].is_leaf
    assert contexts.live() == []
    assert contexts.sent(context, 3, "", tensors) is None
    # Another context of the same creator is not concerned.
    contexts.came((context + 1, 8), 2, ())
    assert contexts.live() == [context + 1]


@pytest.mark.pure
def test_of_released_contexts_only_those_are_remembered_that_are_younger_than_a_living_one() -> None:
    contexts, agent = worker(1)
    base = 2 << 48
    agent.hearers[RELEASE](2, (base, base + 1))
    for number in range(2, 1000):
        agent.hearers[RELEASE](2, (base + number, base + 1))
    assert contexts.remembered_releases == 998
    contexts.came((base + 500, 0), 2, ())
    assert contexts.live() == []
    agent.hearers[RELEASE](2, (base + 1, base + 1000))
    assert not contexts.remembered_releases
    for number in (0, 1, 500, 999):
        contexts.came((base + number, 0), 2, ())
    assert contexts.live() == []


@pytest.mark.pure
def test_contexts_older_than_all_that_live_go_although_nobody_has_released_them_here() -> None:
    contexts, agent = worker(1)
    base = 2 << 48
    for number in range(3):
        contexts.came((base + number, 0), 2, ())
    contexts.came((3 << 48, 0), 3, ())
    agent.hearers[RELEASE](0, (base + 1, base + 2))
    assert contexts.live() == [base + 2, 3 << 48]


@pytest.mark.pure
def test_contexts_of_a_worker_that_is_gone_go_with_it() -> None:
    contexts, agent = worker(1)
    contexts.came((2 << 48, 0), 2, ())
    contexts.came((3 << 48, 0), 2, ())
    mine = contexts.create()
    for tell in agent.when_lost:
        tell(2, RuntimeError("gone"))
    assert contexts.live() == [3 << 48, mine.id]
    contexts.came(((2 << 48) + 5, 0), 3, ())
    assert contexts.live() == [3 << 48, mine.id]


@pytest.mark.pure
def test_a_worker_that_leaves_the_session_before_is_there_in_the_next_one() -> None:
    contexts, agent = worker(1)
    contexts.end()
    for tell in agent.when_lost:
        tell(2, RuntimeError("gone"))
    contexts.begin(Told(1))  # type: ignore[arg-type]
    contexts.came((2 << 48, 0), 2, ())
    assert contexts.live() == [2 << 48]


@pytest.mark.pure
def test_two_thousand_contexts_leave_nothing() -> None:
    creator, agent = worker(0)
    other, its_agent = worker(1)
    for number in range(2000):
        made = creator.create()
        assert rank_of_id(made.id) == 0
        note = creator.sent(made.id, 1, "", [leaf()] if number % 100 == 0 else ())
        assert note is not None
        other.came(note, 0, [leaf()] if note[1] else ())
        creator.release(made)
        for rank, kind, value in agent.notices:
            assert rank == 1
            its_agent.hearers[kind](0, value)
        agent.notices.clear()
    for contexts in (creator, other):
        assert not contexts.live()
        assert contexts.remembered_releases <= 1
    assert not its_agent.notices


@pytest.mark.pure
def test_a_message_that_was_dropped_unopened_takes_its_send_back() -> None:
    sender, its_agent = worker(0)
    receiver, agent = worker(1)
    made = sender.create()
    note = sender.sent(made.id, 1, "answer", [leaf()])
    assert note is not None
    assert list(made.sends) == [note[1]]
    receiver.unwanted(note, 0)
    assert agent.notices == [(0, WITHDRAW, note)]
    its_agent.hearers[WITHDRAW](1, note)
    its_agent.hearers[WITHDRAW](1, note)
    assert not made.sends
