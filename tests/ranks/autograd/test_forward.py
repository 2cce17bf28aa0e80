"""Messages in a context: what leaves a send here and a recv there, what the function gets, and what its caller."""

import copy
import pickle
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import answers, in_another_thread, is_answered, is_attached, recvs, sends
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door, wait_for
from support.rpc.forms import FORMS
from torch import Tensor, nn
from torch.autograd import profiler_legacy

import hvlike.autograd
import hvlike.rpc
from hvlike.autograd.contexts import contexts
from hvlike.rpc.functions import async_execution
from hvlike.rpc.wire.autograd_hooks import this_thread

legacy_profile: Any = profiler_legacy.profile


def leaf(*shape: int) -> Tensor:
    return torch.ones(*(shape or (3,)), requires_grad=True)


def kinds(*tensors: Tensor) -> list[str]:
    """What each tensor is where it has arrived."""
    return [kind(tensor) for tensor in tensors]


def kind(tensor: Tensor) -> str:
    if is_attached(tensor):
        return "attached"
    return "leaf" if tensor.requires_grad else "constant"


def look_at_parameter(parameter: Any) -> dict[str, Any]:
    return {
        "kind": kind(parameter),
        "type": type(parameter).__name__,
        "instance": isinstance(parameter, nn.Parameter),
        "copy": copy.deepcopy(parameter).is_leaf,
        "tag": getattr(parameter, "tag", None),
    }


def describe(tensor: Tensor) -> tuple[str, Any]:
    """Kind and elements."""
    return kind(tensor), tensor.to_dense().tolist()


def fail(tensor: Tensor) -> None:
    raise KeyError("on purpose")


def backward_as_usual(tensor: Tensor) -> None:
    torch.autograd.backward([(tensor * 2).sum()])


def test_a_send_and_a_recv_of_one_number_for_each_message(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, kinds, (leaf(), torch.ones(1), leaf() * 2)) == ["attached", "constant", "attached"]
        sent, came = sends(context), rpc.rpc_sync(peer, recvs, (context,))
        assert list(sent.values()) == [(peer, 2)]
        assert list(came.values()) == [(hvd.rank(), 2)]
        assert list(sent) == list(came)
        assert next(iter(sent)) >> 48 == hvd.rank()


def test_flags_are_per_tensor(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensors = [leaf() if number % 3 else torch.ones(2) for number in range(10)]
    expected = ["attached" if number % 3 else "constant" for number in range(10)]
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, kinds, (torch.ones(2), leaf().detach())) == ["constant", "constant"]
        # A message without any leaves nothing.
        assert sends(context) == {}
        assert rpc.rpc_sync(peer, recvs, (context,)) == {}
        for form in FORMS.values():
            assert form(peer, kinds, tensors) == expected


def test_without_a_context_the_flag_alone_survives(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensors = (leaf(), leaf() * 2, torch.ones(1))
    assert rpc.rpc_sync(peer, kinds, tensors) == ["leaf", "leaf", "constant"]
    with autograd.context() as context:
        other = in_another_thread(lambda: rpc.rpc_sync(peer, kinds, tensors))
        assert other == ["leaf", "leaf", "constant"]
        assert sends(context) == {}


def test_one_tensor_twice_is_one_edge_and_a_view_another(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensor = leaf()
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, kinds, (tensor, tensor, tensor[1:])) == ["attached"] * 3
        assert next(iter(sends(context).values())) == (peer, 2)


def test_edges_are_those_of_the_moment_of_sending(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        tensor = leaf() * 2
        before = tensor.grad_fn
        rpc.rpc_sync(peer, kinds, (tensor,))
        tensor.mul_(3)
        (send,) = contexts.find(context).sends.values()
        assert send.edges[0].node is before
        assert send.about == "kinds"


SPARSE: dict[str, Tensor] = {
    "coalesced": torch.eye(3).to_sparse(),
    "uncoalesced": torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC):UserWarning")
@pytest.mark.parametrize("layout", [*SPARSE, "rows"])
def test_sparse_tensors_are_attached(rpc: ModuleType, autograd: ModuleType, peer: int, layout: str) -> None:
    plain = torch.eye(3).to_sparse_csr() if layout == "rows" else SPARSE[layout].clone()
    tensor = plain.clone().requires_grad_()
    assert rpc.rpc_sync(peer, describe, (tensor,)) == ("leaf", plain.to_dense().tolist())
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, describe, (tensor,)) == ("attached", plain.to_dense().tolist())
        assert rpc.rpc_sync(peer, kinds, (leaf(), tensor, leaf(), plain)) == ["attached"] * 3 + ["constant"]
        assert [count for _, count in sends(context).values()] == [1, 3]


def test_a_parameter_stays_one_and_is_attached(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = "mine"  # type: ignore[attr-defined]
    there = {"type": "Parameter", "instance": True, "copy": True, "tag": "mine"}
    with autograd.context():
        assert rpc.rpc_sync(peer, look_at_parameter, (parameter,)) == {"kind": "attached", **there}
        constant = rpc.rpc_sync(peer, look_at_parameter, (nn.Parameter(torch.ones(2), False),))
        assert (constant["kind"], constant["type"]) == ("constant", "Parameter")
    assert rpc.rpc_sync(peer, look_at_parameter, (parameter,)) == {"kind": "leaf", **there}


def test_where_grad_mode_is_off_nothing_is_recorded(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        with torch.no_grad():
            for form in FORMS.values():
                # The mode does not travel: the function there has its own.
                assert form(peer, torch.is_grad_enabled)
                assert form(peer, kinds, (leaf(),)) == ["leaf"]
            assert rpc.rpc_sync(peer, is_context, (context,))
        assert sends(context) == {}


def is_context(context: int) -> bool:
    return this_thread.context == context


@pytest.mark.parametrize("failing", ["the function", "to open the message"])
def test_a_call_that_fails_there_has_left_its_recv(
    rpc: ModuleType, autograd: ModuleType, peer: int, failing: str
) -> None:
    function, args, error = (fail, (leaf(),), "KeyError")
    if failing == "to open the message":
        function, args, error = kinds, (leaf(), Unreadable()), "unreadable"
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match=error):
            rpc.rpc_sync(peer, function, args)
        assert list(rpc.rpc_sync(peer, recvs, (context,))) == list(sends(context))
        assert list(sends(context).values()) == [(peer, 1)]
        assert rpc.rpc_sync(peer, kinds, (leaf(),)) == ["attached"]


class Unreadable:
    """Cannot be restored where it arrives."""

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("unreadable")


def test_a_message_that_cannot_be_packed_leaves_nothing(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
                call(peer, kinds, (leaf(), lambda: None))
        assert sends(context) == {}


def test_an_answer_that_comes_too_late_takes_its_send_back(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"late {hvd.rank()}"
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync(peer, pass_door, (door, leaf()), timeout=0.05)
        (number,) = sends(context)
        rpc.rpc_sync(peer, open_door, (door,))
        wait_for(lambda: rpc.rpc_sync(peer, is_answered, (door, hvd.rank())))
        # There: the arguments have come; the answer was sent, and is as if it had not been.
        wait_for(lambda: not rpc.rpc_sync(peer, answers, (context, number)))
        assert number in rpc.rpc_sync(peer, recvs, (context,))
        # Here nothing has come.
        assert [each for each in recvs(context) if each != number] == []


def test_an_ordinary_backward_does_not_leave_its_worker(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        with pytest.raises(RuntimeError, match=r"Call hvlike\.autograd\.backward"):
            rpc.rpc_sync(peer, backward_as_usual, (leaf(),))
        arrived = rpc.rpc_sync(peer, torch.add, (leaf(), 1))
        with pytest.raises(RuntimeError, match=r"hvlike\.autograd\.backward"):
            arrived.sum().backward()


@pytest.mark.parametrize("profiler", ["legacy", "kineto"])
def test_a_profiler_changes_nothing(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int, profiler: str
) -> None:
    profile = legacy_profile() if profiler == "legacy" else torch.autograd.profiler.profile(use_kineto=True)
    with autograd.context() as context, profile:
        assert rpc.rpc_sync(peer, kinds, (leaf(), torch.ones(1))) == ["attached", "constant"]
        assert is_attached(rpc.rpc_async(peer, torch.add, (leaf(), 1)).wait())
        assert rpc.rpc_async(peer, is_context, (context,)).then(
            lambda done: (done.wait(), this_thread.context)
        ).wait() == (
            True,
            context,
        )
        fetched = rpc.remote(peer, torch.add, (leaf(), 1)).to_here()
        # On its owner the value is no copy.
        assert is_attached(fetched) == (hvd.size() > 1)
        assert next(iter(sends(context))) in rpc.rpc_sync(peer, recvs, (context,))


def test_with_cloudpickle(hvd: ModuleType) -> None:
    pytest.importorskip("cloudpickle")
    rpc = hvlike.rpc
    peer = (hvd.rank() + 1) % hvd.size()
    rpc.init_rpc(f"worker{hvd.rank()}", rpc_backend_options=rpc.RpcBackendOptions(cloudpickle=True))
    with hvlike.autograd.context() as context:
        weight = leaf()
        assert rpc.rpc_sync(peer, lambda x: kinds(x, weight), (leaf(),)) == ["attached", "attached"]
        assert is_attached(rpc.rpc_sync(peer, lambda x: x * 2, (leaf(),)))
        assert next(count for number, (_, count) in sends(context).items() if number >> 48 == hvd.rank()) == 2
    rpc.shutdown(timeout=60)


WEIGHT = torch.ones(2, requires_grad=True)


def of_own_leaves() -> Tensor:
    """No argument requires grad, the result does."""
    return WEIGHT * 2


def own_leaf() -> Tensor:
    return WEIGHT


def mixed(tensor: Tensor) -> dict[str, Any]:
    return {"double": tensor * 2, "constant": torch.ones(1), "own": WEIGHT.sum(), "detached": tensor.detach(), "n": 3}


def wait_and_double(door: str) -> Tensor:
    pass_door(door)
    return of_own_leaves()


def double_without_grad(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor * 2


@async_execution
def double_later(to: int, tensor: Tensor) -> Any:
    """The result of another worker, changed here in a callback."""
    return hvlike.rpc.rpc_async(to, torch.mul, (tensor, 2)).then(lambda future: future.wait() * 2)


@async_execution
def double_without_grad_later(to: int, tensor: Tensor) -> Any:
    with torch.no_grad():
        return hvlike.rpc.rpc_async(to, torch.mul, (tensor, 2)).then(lambda future: (future.wait() * 2).requires_grad)


def unsendable() -> Any:
    """Has a tensor that requires grad, and something that cannot be sent."""
    return WEIGHT * 2, threading.Lock()


def test_an_answer_leaves_a_send_there_and_a_recv_here(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        arrived = rpc.rpc_sync(peer, of_own_leaves)
        assert is_attached(arrived)
        came = recvs(context)
        assert list(came.values()) == [(peer, 1)]
        (number,) = came
        assert number >> 48 == peer
        assert rpc.rpc_sync(peer, sends, (context,))[number] == (hvd.rank(), 1)


def test_results_require_grad_because_of_leaves_there(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    """Every fetch of a value is a message of its own; on its owner it is no copy."""
    is_copied = peer != rpc.get_worker_info().id
    for function in (of_own_leaves, own_leaf):
        rref = rpc.remote(peer, function)
        assert rref.to_here().is_leaf or not (is_copied or function is own_leaf)
        with autograd.context() as context:
            assert is_attached(rpc.rpc_sync(peer, function))
            assert is_attached(rpc.rpc_async(peer, function).wait())
            count = len(recvs(context))
            first, second = rref.to_here(), rref.to_here()
            if is_copied:
                assert is_attached(first)
                assert first.grad_fn is not second.grad_fn
                assert list(recvs(context).values())[count:] == [(peer, 1), (peer, 1)]


def test_each_tensor_of_a_result_is_as_it_was_there(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        arrived = rpc.rpc_sync(peer, mixed, (torch.ones(2, requires_grad=True),))
        assert is_attached(arrived["double"])
        assert is_attached(arrived["own"])
        assert arrived["double"].grad_fn is arrived["own"].grad_fn
        assert not arrived["constant"].requires_grad
        assert not arrived["detached"].requires_grad
        assert not rpc.rpc_sync(peer, double_without_grad, (torch.ones(2, requires_grad=True),)).requires_grad


def test_results_outside_of_the_context_are_leaves(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        arrived = in_another_thread(lambda: rpc.rpc_sync(peer, of_own_leaves))
        assert (arrived.requires_grad, arrived.is_leaf) == (True, True)
        assert recvs(context) == {}
    arrived = rpc.rpc_sync(peer, of_own_leaves)
    assert (arrived.requires_grad, arrived.is_leaf) == (True, True)


def test_results_under_no_grad_are_leaves(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context():
        with torch.no_grad():
            for arrived in (
                rpc.rpc_sync(peer, of_own_leaves),
                rpc.rpc_async(peer, of_own_leaves).wait(),
                rpc.rpc_sync(peer, torch.mul, (tensor, 2)),
            ):
                assert (arrived.requires_grad, arrived.is_leaf) == (True, True)
            rref = rpc.remote(peer, own_leaf)
            assert rref.to_here().is_leaf


def test_callbacks_have_the_grad_mode_of_the_call(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"grad mode {hvd.rank()}"
    with autograd.context():
        with torch.no_grad():
            future = rpc.rpc_async(peer, wait_and_double, (door,))
            constant = future.then(lambda done: (done.wait().is_leaf, torch.is_grad_enabled()))
        graded = rpc.rpc_async(peer, wait_and_double, (door,)).then(
            lambda done: (is_attached(done.wait()), torch.is_grad_enabled())
        )
        rpc.rpc_sync(peer, open_door, (door,))
        assert constant.wait() == (True, False)
        assert graded.wait() == (True, True)


@pytest.mark.mpi(min_size=2)
def test_a_value_that_is_still_made_comes_in_the_context_of_who_fetches_it(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"made {hvd.rank()}"
    # Made without a context, by a call that is still going on.
    rref = rpc.remote(peer, wait_and_double, (door,))

    def fetch() -> tuple[int, bool, int]:
        with autograd.context() as context:
            arrived = rref.to_here()
            return this_thread.context, is_attached(arrived), len(recvs(context))

    threads: list[threading.Thread] = []
    fetched: list[tuple[int, bool, int]] = []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: fetched.append(fetch())))
        threads[-1].start()
    plain: list[Tensor] = []
    threads.append(threading.Thread(target=lambda: plain.append(rref.to_here())))
    threads[-1].start()
    with autograd.context():
        # The door is opened in a third context.
        rpc.rpc_sync(peer, open_door, (door,))
    for thread in threads:
        thread.join()
    assert len({context for context, _, _ in fetched}) == 2
    assert [(attached, count) for _, attached, count in fetched] == [(True, 1), (True, 1)]
    assert plain[0].is_leaf


def test_an_answer_that_another_call_completes_is_in_the_context_of_its_own_request(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    promise = f"answers {hvd.rank()}"
    with autograd.context() as context:
        future = rpc.rpc_async(peer, await_promise, (promise,))

        def keep_in_another() -> dict[int, tuple[int, int]]:
            with autograd.context() as another:
                rpc.rpc_sync(peer, keep_promise, (promise, torch.ones(2, requires_grad=True)))
                found: dict[int, tuple[int, int]] = rpc.rpc_sync(peer, sends, (another,))
                return {number: send for number, send in found.items() if number >> 48 == peer != hvd.rank()}

        in_another_thread(keep_in_another)
        assert is_attached(future.wait())
        (number,) = recvs(context)
        assert number in rpc.rpc_sync(peer, sends, (context,))


def test_answers_of_async_functions_are_attached_all_the_way(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    beyond = (peer + 1) % hvd.size()
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context():
        for form in FORMS.values():
            arrived = form(peer, double_later, (beyond, tensor))
            assert arrived.tolist() == [4.0, 4.0]
            assert arrived.requires_grad
            assert not arrived.is_leaf
        assert rpc.rpc_sync(peer, double_without_grad_later, (beyond, tensor)) is False


def test_a_result_that_cannot_be_sent_leaves_nothing(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="cannot be sent"):
            rpc.rpc_sync(peer, unsendable)
        assert recvs(context) == {}
        assert rpc.rpc_sync(peer, sends, (context,)) == {}
        assert is_attached(rpc.rpc_sync(peer, of_own_leaves))
