"""RemoteModule: what it runs where, what travels, what it refuses, and where it can be put."""

import copy
import io
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hvlike
from hvlike.errors import UsageError
from hvlike.rpc import RemoteModule


class Echo(nn.Module):
    """Returns its arguments in reverse order; has a parameter of its own and one in a child."""

    def __init__(self, first: float, second: float = -1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([first, second]))
        self.child = nn.Linear(2, 1)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        return word, number, tensor


class Scale(nn.Module):
    """Multiplies with one weight."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * self.weight


class NoModule:
    """Cannot be a remote module."""


def make_scale(weight: float) -> nn.Module:
    return Scale(weight)


def grow(rref: Any, factor: float) -> None:
    with torch.no_grad():
        rref.local_value().weight.mul_(factor)


def training_of(rref: Any) -> bool:
    training: bool = rref.local_value().training
    return training


def owner_sees(rref: Any) -> tuple[torch.dtype, torch.dtype]:
    module = rref.local_value()
    return module.weight.dtype, module.steps.dtype


def attributes_of(remote_module: RemoteModule) -> list[str]:
    return sorted(vars(remote_module))


def use(remote_module: RemoteModule, value: float) -> tuple[Any, bool, str]:
    rref = remote_module.get_module_rref()
    return remote_module(torch.tensor([value])), rref.confirmed_by_owner(), rref.owner_name()


def hand_back(remote_module: RemoteModule) -> RemoteModule:
    return remote_module


def add_hook(rref: Any) -> None:
    rref.local_value().register_forward_hook(lambda module, inputs, output: output + 1)


@pytest.fixture
def other(rpc: ModuleType) -> str:
    """The name of the last worker; this one in a job of one rank."""
    name: str = rpc.get_worker_info(hvlike.size() - 1).name
    return name


def first(rpc: ModuleType) -> bool:
    """Rank 0 tests, the others serve until the fixture's shutdown."""
    return bool(rpc.get_worker_info().id == 0)


def test_forward_runs_where_the_module_lives(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(f"{other}/cpu", Echo, (1.0,), {"second": 2.0})
        assert module.on == other
        assert module.device == "cpu"
        assert module.get_module_rref() is module.module_rref
        assert module.get_module_rref().owner_name() == other
        for word, number, tensor in (
            module.forward(torch.ones(3), 2, "3"),
            module(torch.ones(3), 2, word="3"),
            module.forward_async(torch.ones(3), number=2, word="3").wait(),
        ):
            assert (word, number) == ("3", 2)
            assert torch.equal(tensor, torch.ones(3))
        assert module(torch.ones(3), 2)[0] == "default"
        assert isinstance(module.forward_async(torch.ones(3), 2), torch._C.Future)


def test_every_form_of_a_place(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        worker = rpc.get_worker_info(other)
        for place in (other, f"{other}/cpu", f"rank:{worker.id}", f"rank:{worker.id}/cpu"):
            module = RemoteModule(place, make_scale, [3.0])
            assert module.get_module_rref().owner() == worker
            assert torch.equal(module(torch.tensor([2.0])), torch.tensor([6.0]))
            assert repr(module) == f"RemoteModule(on={module.on!r}, device='cpu')"
        for unknown in ("nobody", "nobody/cpu", "rank:99"):
            with pytest.raises(RuntimeError, match="could not find destination"):
                RemoteModule(unknown, Scale)


def test_parameters_are_rrefs_of_the_owners_parameters(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Echo, (1.0, 2.0))
        whole = module.remote_parameters()
        assert [tuple(rref.to_here().shape) for rref in whole] == [(2,), (1, 2), (1,)]
        assert all(rref.owner_name() == other for rref in whole)
        own = module.remote_parameters(recurse=False)
        assert len(own) == 1
        rpc.rpc_sync(other, grow, args=(module.get_module_rref(), 10.0))
        assert own[0].to_here().requires_grad
        assert own[0].to_here().tolist() == [10.0, 20.0]


def test_train_and_eval_reach_the_module_also_as_a_part_of_another(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Echo, (1.0,))
        for change, expected in ((module.eval, False), (module.train, True), (lambda: module.train(False), False)):
            assert change() is module
            assert module.training is expected
            assert rpc.rpc_sync(other, training_of, args=(module.get_module_rref(),)) is expected
        nn.Sequential(nn.Linear(2, 2), module).train()
        assert rpc.rpc_sync(other, training_of, args=(module.get_module_rref(),)) is True


def test_to_converts_floating_point_values_on_the_owner(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Echo, (1.0,))
        assert module.to("cpu", dtype=torch.float64) is module
        assert rpc.rpc_sync(other, owner_sees, args=(module.get_module_rref(),)) == (torch.float64, torch.int64)
        for refused in (("cpu", torch.int32), ("meta",), ("nowhere",), (torch.ones(1),)):
            with pytest.raises(ValueError, match="Method ``to`` not supported for RemoteModule"):
                module.to(*refused)


def test_it_travels_as_a_reference_with_its_own_attributes_only(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Scale)
        setattr(module, "new_attribute", 1)  # noqa: B010
        for worker in range(hvlike.size()):
            attributes = rpc.rpc_sync(worker, attributes_of, args=(module,))
            assert {"on", "device", "module_rref"} <= set(attributes)
            assert "new_attribute" not in attributes
            result, confirmed, owner = rpc.rpc_sync(worker, use, args=(module, 4.0))
            assert result.item() == 8
            assert confirmed
            assert owner == other
            back = rpc.rpc_sync(worker, hand_back, args=(module,))
            assert back is not module
            assert (back.on, back.device) == (module.on, module.device)
            rpc.rpc_sync(other, grow, args=(back.get_module_rref(), 1.0))
            assert back(torch.tensor([4.0])).item() == 8


def test_a_second_one_around_the_same_module(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Scale)
        second = RemoteModule.init_from_module_rref(f"{other}/cpu", module.get_module_rref())
        rpc.rpc_sync(other, grow, args=(second.get_module_rref(), 2.0))
        assert module(torch.tensor([1.0])).item() == second(torch.tensor([1.0])).item() == 4
        assert [parameter.tolist() for parameter in second.get_module_rref().to_here().parameters()] == [[4.0]]
        elsewhere = rpc.rpc_sync(other, RemoteModule.init_from_module_rref, args=(other, module.get_module_rref()))
        assert elsewhere(torch.tensor([1.0])).item() == 4
        # Hooks of the owner's module run.
        rpc.rpc_sync(other, add_hook, args=(module.get_module_rref(),))
        assert module(torch.tensor([1.0])).item() == 5


@pytest.mark.mpi(min_size=2)
def test_a_second_one_must_name_the_owner(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Scale)
        with pytest.raises(UsageError, match="lives on WorkerInfo"):
            RemoteModule.init_from_module_rref("rank:0", module.get_module_rref())


def test_a_constructor_that_returns_no_module_is_an_error_of_every_use(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, NoModule)  # type: ignore[arg-type]
        for use_it in (module.forward, module.remote_parameters, module.eval, module.forward_async(1).wait):
            with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of"):
                use_it()


def test_an_error_of_forward_keeps_its_type(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Scale)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            module()
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            module.forward_async().wait()
        assert module(torch.tensor([1.0])).item() == 2


@pytest.mark.pure
@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("worker0/meta", "placed on a CPU or a GPU.*'<worker>/cuda:<number>'"),
        ("rank:1/mps", "placed on a CPU or a GPU"),
        ("cpu", "names no worker"),
        ("cuda:1", "names no worker"),
        ("", "Could not parse remote_device"),
        ("/cpu", "Could not parse remote_device"),
        ("worker0/", "Could not parse remote_device"),
        ("worker0/cpu/0", "Could not parse remote_device"),
        ("worker0/nowhere", "Could not parse remote_device"),
        ("rank:x/cpu", "Could not parse remote_device"),
        ("host:1:2/cpu", "Could not parse remote_device"),
        (1, "is a string"),
    ],
)
def test_a_wrong_place_is_refused_at_once(place: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RemoteModule(place, Scale)


@pytest.mark.pure
def test_outside_of_a_session_nothing_is_created() -> None:
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        RemoteModule("worker0", Scale)


REFUSED = """
add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu load_state_dict modules
named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
register_forward_hook register_forward_pre_hook register_full_backward_hook register_parameter requires_grad_
share_memory state_dict type xpu zero_grad
"""


def test_what_torch_refuses_is_refused(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        module = RemoteModule(other, Scale)
        for name in REFUSED.split():
            with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
                getattr(module, name)()
        with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
            module.parameters()
        for way in (pickle.dumps, copy.deepcopy, lambda value: torch.save(value, io.BytesIO())):
            with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
                way(module)


@pytest.mark.mpi(min_size=3)
def test_a_chain_of_modules_on_all_workers_equals_one_process(rpc: ModuleType, other: str) -> None:
    if first(rpc):
        chain = nn.Sequential(*[RemoteModule(f"rank:{rank}", Scale, (rank + 1.0,)) for rank in range(hvlike.size())])
        local = nn.Sequential(*[Scale(rank + 1.0) for rank in range(hvlike.size())])
        assert torch.equal(chain(torch.arange(5.0)), local(torch.arange(5.0)))
