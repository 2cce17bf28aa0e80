"""Arguments in a context: what leaves a send here and a recv there, and what the function gets."""

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import answers, in_another_thread, is_answered, is_attached, recvs, sends, wait_for
from support.rpc.doors import open_door, pass_door
from torch import Tensor, nn
from torch.autograd import profiler_legacy

import hvlike.autograd
import hvlike.rpc
from hvlike.autograd.contexts import contexts
from hvlike.rpc.wire.autograd_hooks import this_thread

Pair = namedtuple("Pair", ["first", "second"])
legacy_profile: Any = profiler_legacy.profile


@dataclass
class Holder:
    """A class of the user's that has a tensor."""

    tensor: Tensor
    name: str


def leaf(*shape: int) -> Tensor:
    return torch.ones(*(shape or (3,)), requires_grad=True)


def kinds(*tensors: Tensor) -> list[str]:
    """What each tensor is where it has arrived."""
    return [kind(tensor) for tensor in tensors]


def kind(tensor: Tensor) -> str:
    if is_attached(tensor):
        return "attached"
    return "leaf" if tensor.requires_grad else "constant"


def kinds_in(value: Any) -> list[str]:
    """The same of tensors in containers."""
    if isinstance(value, Tensor):
        return [kind(value)]
    if isinstance(value, Holder):
        return kinds_in(value.tensor)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [each for part in value for each in kinds_in(part)] if isinstance(value, list | tuple) else []


def share(first: Tensor, second: Tensor) -> tuple[list[str], bool, bool]:
    """Whether a change in one shows in the other, which is a view of the same memory."""
    with torch.no_grad():
        first.fill_(5)
    return kinds(first, second), bool((second == 5).all()), first is second


def change_in_place(tensor: Tensor) -> tuple[str, list[float]]:
    tensor.mul_(3).add_(1)
    assert tensor.grad_fn is not None
    return type(tensor.grad_fn).__name__, tensor.tolist()


def look_at_parameter(parameter: Any) -> dict[str, Any]:
    return {
        "kind": kind(parameter),
        "type": type(parameter).__name__,
        "instance": isinstance(parameter, nn.Parameter),
        "copy": copy.deepcopy(parameter).is_leaf,
        "tag": getattr(parameter, "tag", None),
    }


def look_at_module(module: nn.Module, to: int) -> tuple[list[str], list[str], list[str]]:
    """Kinds of the parameters here and on the next worker, types."""
    types = [type(parameter).__name__ for parameter in module.parameters()]
    here = kinds(*module.parameters())
    return here, hvlike.rpc.rpc_sync(to, kinds, tuple(module.parameters())), types


def describe(tensor: Tensor) -> tuple[str, Any]:
    """Kind and how it lies in memory; strides where there are any."""
    if tensor.layout is torch.sparse_coo:
        return kind(tensor), (tensor.is_coalesced(), tensor.to_dense().tolist())
    if tensor.layout is torch.strided:
        return kind(tensor), (tensor.stride(), tensor.is_conj(), tensor.tolist())
    return kind(tensor), tensor.to_dense().tolist()


def add_to_conjugate(tensor: Tensor) -> list[complex]:
    tensor.add_(1)
    values: list[complex] = tensor.tolist()
    return values


def fail(tensor: Tensor) -> None:
    raise KeyError("on purpose")


def relay(tensor: Tensor, to: int) -> tuple[list[str], dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """What the next worker gets of a tensor as it has come, and this worker's messages."""
    there = hvlike.rpc.rpc_sync(to, kinds, (tensor, tensor * 2))
    return there, sends(this_thread.context), recvs(this_thread.context)


def through_an_rref(rref: Any, tensor: Tensor) -> list[str]:
    return kinds(tensor, rref.to_here())


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


def test_messages_whose_tensors_do_not_require_grad_leave_nothing(
    rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, kinds, (torch.ones(2), leaf().detach())) == ["constant", "constant"]
        assert sends(context) == {}
        assert rpc.rpc_sync(peer, recvs, (context,)) == {}


def test_flags_are_per_tensor(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensors = [leaf() if number % 3 else torch.ones(2) for number in range(10)]
    expected = ["attached" if number % 3 else "constant" for number in range(10)]
    with autograd.context():
        assert rpc.rpc_sync(peer, kinds, tensors) == expected
        assert rpc.rpc_async(peer, kinds, tensors).wait() == expected
        assert rpc.remote(peer, kinds, tensors).to_here() == expected


def test_without_a_context_the_flag_alone_survives(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensors = (leaf(), leaf() * 2, torch.ones(1))
    assert rpc.rpc_sync(peer, kinds, tensors) == ["leaf", "leaf", "constant"]
    with autograd.context() as context:
        other = in_another_thread(lambda: rpc.rpc_sync(peer, kinds, tensors))
        assert other == ["leaf", "leaf", "constant"]
        assert sends(context) == {}


def test_tensors_in_any_container_are_attached(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    value = [
        (leaf(), [leaf(), {"key": leaf(), 3: torch.ones(1)}]),
        Pair(leaf(), torch.ones(1)),
        {leaf(): Holder(leaf(), "held")},
    ]
    with autograd.context():
        there = rpc.rpc_sync(peer, kinds_in, (value,))
    assert there == ["attached"] * 3 + ["constant", "attached", "constant"] + ["attached"] * 2


def test_one_tensor_twice_is_one_edge(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensor = leaf()
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, share, (tensor, tensor)) == (["attached", "attached"], True, True)
        assert next(iter(sends(context).values())) == (peer, 1)


@pytest.mark.parametrize("length", [4, 100_000])
def test_views_of_one_storage_share_it_there(rpc: ModuleType, autograd: ModuleType, peer: int, length: int) -> None:
    tensor = leaf(length)
    with autograd.context() as context:
        attached, shared, same = rpc.rpc_sync(peer, share, (tensor, tensor[1:3]))
        assert (attached, shared, same) == (["attached", "attached"], True, False)
        assert next(iter(sends(context).values())) == (peer, 2)


def test_what_has_come_may_be_changed_in_place(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        assert rpc.rpc_sync(peer, change_in_place, (leaf(),)) == ("AddBackward0", [4.0, 4.0, 4.0])


def test_edges_are_those_of_the_moment_of_sending(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        tensor = leaf() * 2
        before = tensor.grad_fn
        rpc.rpc_sync(peer, kinds, (tensor,))
        tensor.mul_(3)
        (send,) = contexts.find(context).sends.values()
        assert send.edges[0].node is before
        assert send.about == "kinds"


def test_leaves_lead_to_the_nodes_that_accumulate(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensors = [leaf(), torch.eye(2).to_sparse().requires_grad_(), nn.Parameter(torch.ones(2))]
    with autograd.context() as context:
        rpc.rpc_sync(peer, kinds, tensors)
        (send,) = contexts.find(context).sends.values()
        variables: list[Any] = [edge.node for edge in send.edges]
        assert all(node.variable is tensor for node, tensor in zip(variables, tensors, strict=True))


def test_shapes_and_strides_stay(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    whole = torch.arange(12.0).view(3, 4).requires_grad_()
    tensors = [
        whole,
        whole.t(),
        whole[:, 1],
        torch.zeros((), requires_grad=True),
        torch.zeros(0, 3, requires_grad=True),
    ]
    with autograd.context():
        for tensor in tensors:
            assert rpc.rpc_sync(peer, describe, (tensor,)) == ("attached", (tensor.stride(), False, tensor.tolist()))


def test_conjugates_and_complex_tensors(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    with autograd.context():
        for each in (tensor, tensor.conj()):
            found, (_, _, values) = rpc.rpc_sync(peer, describe, (each,))
            assert (found, values) == ("attached", each.tolist())
            assert rpc.rpc_sync(peer, add_to_conjugate, (each,)) == (each + 1).tolist()


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_tensors_are_attached(rpc: ModuleType, autograd: ModuleType, peer: int, coalesced: bool) -> None:
    indices, values = torch.tensor([[0, 2, 2]]), torch.tensor([1.0, 2.0, 3.0])
    plain = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=False)
    tensor = (plain.coalesce() if coalesced else plain.clone()).requires_grad_()
    dense = tensor.detach().to_dense().tolist()
    assert rpc.rpc_sync(peer, describe, (tensor,)) == ("leaf", (coalesced, dense))
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, describe, (tensor,)) == ("attached", (coalesced, dense))
        assert rpc.rpc_sync(peer, kinds, (leaf(), tensor, leaf(), plain)) == ["attached"] * 3 + ["constant"]
        assert [count for _, count in sends(context).values()] == [1, 3]


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC):UserWarning")
def test_compressed_sparse_tensors_are_attached(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    tensor = torch.eye(3).to_sparse_csr().requires_grad_()
    with autograd.context():
        assert rpc.rpc_sync(peer, describe, (tensor,)) == ("attached", torch.eye(3).tolist())


def test_a_parameter_stays_one_and_is_attached(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = "mine"  # type: ignore[attr-defined]
    there = {"type": "Parameter", "instance": True, "copy": True, "tag": "mine"}
    with autograd.context():
        assert rpc.rpc_sync(peer, look_at_parameter, (parameter,)) == {"kind": "attached", **there}
        constant = rpc.rpc_sync(peer, look_at_parameter, (nn.Parameter(torch.ones(2), False),))
        assert (constant["kind"], constant["type"]) == ("constant", "Parameter")
    assert rpc.rpc_sync(peer, look_at_parameter, (parameter,)) == {"kind": "leaf", **there}


def test_modules_come_with_attached_parameters(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context():
        here, beyond, types = rpc.rpc_sync(peer, look_at_module, (nn.Linear(2, 3), hvd.rank()))
    assert here == beyond == ["attached", "attached"]
    assert types == ["Parameter", "Parameter"]


def test_operators_of_torch_get_attached_tensors_too(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        for function, args in ((torch.add, (leaf(), 1)), (torch.stack, ([leaf(), leaf()],)), (nn.ReLU(), (leaf(),))):
            assert is_attached(rpc.rpc_sync(peer, function, args))
        own = [number for number, (rank, _) in sends(context).items() if number >> 48 == rpc.get_worker_info().id]
        assert len(own) >= 3


def test_where_grad_mode_is_off_nothing_is_recorded(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        with torch.no_grad():
            # The mode does not travel: the function there has its own.
            assert rpc.rpc_sync(peer, torch.is_grad_enabled)
            assert rpc.rpc_sync(peer, kinds, (leaf(),)) == ["leaf"]
            assert rpc.rpc_async(peer, kinds, (leaf(),)).wait() == ["leaf"]
            assert rpc.remote(peer, kinds, (leaf(),)).to_here() == ["leaf"]
            assert rpc.rpc_sync(peer, is_context, (context,))
        assert sends(context) == {}


def is_context(context: int) -> bool:
    return this_thread.context == context


def test_a_worker_that_calls_itself_has_the_same_pair(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType) -> None:
    with autograd.context() as context:
        assert rpc.rpc_sync(hvd.rank(), kinds, (leaf(),)) == ["attached"]
        assert list(sends(context)) == list(recvs(context))
        assert list(sends(context).values()) == [(hvd.rank(), 1)]


def test_what_has_come_is_sent_on_from_where_it_has_come(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context():
        there, sent, came = rpc.rpc_sync(peer, relay, (leaf(), hvd.rank()))
        assert there == ["attached", "attached"]
        assert (hvd.rank(), 2) in sent.values()
        assert (hvd.rank(), 1) in came.values()


def test_beside_rrefs(hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    rref = rpc.RRef(leaf())
    with autograd.context():
        # To its owner the value comes as it is, to all others as a copy.
        here = "leaf" if hvd.size() == 1 else "attached"
        assert rpc.rpc_sync(peer, through_an_rref, (rref, leaf())) == ["attached", here]


def test_a_function_that_fails_has_had_its_arguments(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="KeyError"):
            rpc.rpc_sync(peer, fail, (leaf(),))
        assert list(rpc.rpc_sync(peer, recvs, (context,))) == list(sends(context))
        assert rpc.rpc_sync(peer, kinds, (leaf(),)) == ["attached"]


def test_a_message_that_cannot_be_opened_leaves_its_recv(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="unreadable"):
            rpc.rpc_sync(peer, kinds, (leaf(), Unreadable()))
        assert list(rpc.rpc_sync(peer, recvs, (context,))) == list(sends(context))
        assert list(sends(context).values()) == [(peer, 1)]


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
