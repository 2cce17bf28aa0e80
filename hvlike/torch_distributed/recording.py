"""What torch's profilers and CommDebugMode see of the calls.

Both watch torch's own backends and its dispatcher, which the calls of a group that is written in Python do not pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvlike.torch_distributed.autoload import BACKEND_NAME

_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_has_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_NO_RANGE: AbstractContextManager[Any] = nullcontext()

# Calls that CommDebugMode counts: the operators of torch.ops.c10d for them.
_OPERATORS = {
    "all_reduce": "allreduce_",
    "reduce": "reduce_",
    "broadcast": "broadcast_",
    "all_gather": "allgather_",
    "all_gather_coalesced": "allgather_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
}


def recorded(what: str, tensors: Sequence[torch.Tensor] = ()) -> AbstractContextManager[Any]:
    """Have CommDebugMode count a call. Returns a range of torch's profilers, with the shapes of these tensors.

    It ends with the call that it stands for: a range that outlasts its profile makes torch write to freed memory.
    """
    if _has_modes():
        _count(what)
    if not _is_profiled():
        return _NO_RANGE
    made: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(f"{BACKEND_NAME}:{what}", list(tensors))
    return made


def _count(what: str) -> None:
    comm_mode = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    operator = getattr(torch.ops.c10d, _OPERATORS[what], None) if what in _OPERATORS else None
    if comm_mode is None or operator is None:
        return
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, comm_mode.CommDebugMode):
            mode.__torch_dispatch__(_Operator(operator), ())


class _Operator:
    """Stands for an operator that torch's own backends dispatch; the call itself is made elsewhere."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None:
        pass

    def __repr__(self) -> str:
        return str(self._overloadpacket)
