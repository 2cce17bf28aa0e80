"""RemoteModule: a module that lives on another worker and is called as if it were local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from hvlike.errors import RpcError, UsageError
from hvlike.rpc.agent.agent import current_agent
from hvlike.rpc.agent.calls import rpc_async, rpc_sync
from hvlike.rpc.rrefs.rref import RRef, remote
from hvlike.rpc.wire.pickler import REDUCERS

FORMS = "'<worker>', '<worker>/cpu', '<worker>/cuda:<number>', or 'rank:<rank>' in the place of the worker"


def parse_placement(text: str) -> tuple[str | int, str]:
    """Return the worker, which may not exist, and the device of a remote device. Raises: UsageError for other forms."""
    if not isinstance(text, str):
        raise UsageError(f"a remote device is a string such as {FORMS}, got {text!r}")
    worker, slash, device = text.partition("/")
    if not slash and is_device(worker):
        raise UsageError(f"remote device {text!r} names no worker; write {FORMS}")
    rank = worker.removeprefix("rank:")
    by_rank = worker.startswith("rank:") and rank.isdecimal()
    if not worker or (":" in worker and not by_rank) or (slash and not is_device(device)):
        raise UsageError(f"Could not parse remote_device: {text!r}. The valid forms are {FORMS}")
    device = device or "cpu"
    if torch.device(device).type not in ("cpu", "cuda"):
        raise UsageError(f"remote device {text!r}: modules are placed on a CPU or a GPU; write {FORMS}")
    return int(rank) if by_rank else worker, device


def is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


# torch refuses these too: the parts of a remote module are not here, and hooks set here would not run there.
REFUSED = """
    add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu load_state_dict modules
    named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_parameter requires_grad_
    share_memory state_dict type xpu zero_grad
"""
ADVICE = {"parameters": " Please use ``remote_parameters`` instead."}


class RemoteModule(nn.Module):
    """A module that one worker owns and any worker can call. It travels through RPC as a reference.

    Any worker can make one during an RPC session; does not block. An error of the constructor is raised by the first
    call that uses the module. On a GPU, the module and the tensors in the arguments of a call are moved there; tensors
    in a result travel from the GPU if the caller has a device map to that worker, otherwise from the CPU.

    Args:
        remote_device: "worker1", "worker1/cpu", "worker1/cuda:0", or "rank:1" in the place of "worker1".
        module_cls: A subclass of Module, or a function that returns a module; called on the worker.
        args: Positional arguments of module_cls.
        kwargs: Keyword arguments of module_cls.

    Raises:
        UsageError: For another form of remote_device, or a device that is no CPU or GPU.
        RuntimeError: For an unknown worker, and outside of a session.

    Example:
        layer = rpc.RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        out = layer(torch.randn(8, 20))

    Source: torch.distributed.nn.RemoteModule.
    """

    on: str | int
    """The owner's name or rank."""
    device: str
    """The module's device on the owner."""
    module_rref: RRef[nn.Module]
    """The RRef of the module."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.on, self.device = parse_placement(remote_device)
        self.module_rref = remote(self.on, _create, args=(module_cls, args or (), kwargs or {}, self.device))

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Return a RemoteModule of a module that exists already.

        Args:
            remote_device: As for the constructor; must name the owner of the RRef.
            module_rref: The RRef of the module.

        Returns:
            The RemoteModule.

        Raises:
            UsageError: For another form or device, and for a worker that is not the owner.
        """
        on, device = parse_placement(remote_device)
        named, owner = current_agent().worker(on), module_rref.owner()
        if named != owner:
            raise UsageError(f"the module of this RRef lives on {owner}, not on {named}; name its owner as the device")
        return _assemble(on, device, module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on its owner. Blocks. Hooks of the module run there.

        Args:
            *args: Positional arguments; copies of them travel.
            **kwargs: Keyword arguments, likewise.

        Returns:
            A copy of the result.

        Raises:
            Exception: What rpc_sync raises.
        """
        return rpc_sync(self.module_rref.owner(), _call, args=(self.module_rref, args, kwargs, *self._devices()))

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Call the module on its owner. Does not block.

        Args:
            *args: Positional arguments; copies of them travel.
            **kwargs: Keyword arguments, likewise.

        Returns:
            A future of a copy of the result.

        Raises:
            Exception: What rpc_async raises.
        """
        return rpc_async(self.module_rref.owner(), _call, args=(self.module_rref, args, kwargs, *self._devices()))

    def _devices(self) -> tuple[str, bool]:
        """Return the module's device, and whether its results must travel from the CPU."""
        device = torch.device(self.device)
        here = device.type, device.index or 0
        targets = current_agent().devices.requests.get(self.module_rref.owner().id, {}).values()
        return self.device, device.type != "cpu" and all((each.type, each.index) != here for each in targets)

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the RRef of the module: to_here() copies the module, local_value() on the owner is the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return RRefs of the module's parameters. Blocks.

        Args:
            recurse: As for Module.parameters: also the parameters of submodules.

        Returns:
            The RRefs, in the order of Module.parameters.
        """
        found: list[RRef[nn.Parameter]] = rpc_sync(
            self.module_rref.owner(), _parameters, args=(self.module_rref, recurse)
        )
        return found

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the training mode of the module on its owner. Blocks.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            self.
        """
        rpc_sync(self.module_rref.owner(), _change, args=(self.module_rref, "train", (mode,), {}))
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        """Set the module on its owner to evaluation, and return self. Blocks."""
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> RemoteModule:
        """Convert the module's floating-point parameters and buffers on its owner. Blocks.

        Args:
            *args: A floating-point or complex dtype, or the device "cpu", as for Module.to.
            **kwargs: Likewise.

        Returns:
            self.

        Raises:
            UsageError: For everything else that Module.to takes.
        """
        for value in (*args, *kwargs.values()):
            is_dtype = isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex)
            is_cpu = isinstance(value, (str, torch.device)) and str(value) == "cpu"
            if not is_dtype and not is_cpu:
                raise UsageError(
                    f"Method ``to`` not supported for RemoteModule with {value!r}; give a floating-point or complex "
                    "dtype, or the device 'cpu'"
                )
        rpc_sync(self.module_rref.owner(), _change, args=(self.module_rref, "to", args, kwargs))
        if any(str(value) == "cpu" for value in (*args, *kwargs.values())):
            self.device = "cpu"
        return self

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __getstate__(self) -> NoReturn:
        raise RpcError("Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(f"Method ``{name}`` not supported for RemoteModule.{ADVICE.get(name, '')}")

    refused.__name__ = name
    return refused


for _name in REFUSED.split():
    setattr(RemoteModule, _name, _refuse(_name))


def _assemble(on: str | int, device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(module)
    module.on, module.device, module.module_rref = on, device, module_rref
    return module


# Attributes that the program has set on it do not travel.
REDUCERS[RemoteModule] = lambda pickler, module: (_assemble, (module.on, module.device, module.module_rref))


# The following functions run on the owner.
def _create(
    module_cls: Callable[..., nn.Module], args: Sequence[Any], kwargs: dict[str, Any], device: str
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise UsageError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module if device == "cpu" else module.to(device)


def _call(module_rref: RRef[nn.Module], args: Sequence[Any], kwargs: dict[str, Any], device: str, to_cpu: bool) -> Any:
    if device != "cpu":
        args, kwargs = _moved(args, device), _moved(kwargs, device)
    result = module_rref.local_value()(*args, **kwargs)
    return _moved(result, "cpu") if to_cpu else result


def _moved(value: Any, device: str) -> Any:
    """Return the value with all tensors in nested tuples, lists and dicts on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _moved(item, device)) for key, item in value.items())
    return value


def _parameters(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _change(module_rref: RRef[nn.Module], method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    getattr(module_rref.local_value(), method)(*args, **kwargs)
