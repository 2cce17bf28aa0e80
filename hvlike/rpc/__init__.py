"""Remote procedure calls between the ranks of a job, with the names of torch.distributed.rpc, over MPI."""

# Autograd is above RPC and adds to its messages; a worker needs it as soon as another worker uses it.
import hvlike.autograd  # noqa: F401
from hvlike.rpc import api, constants, functions
from hvlike.rpc.agent.agent import is_running as _is_current_rpc_agent_set
from hvlike.rpc.agent.calls import rpc_async, rpc_sync
from hvlike.rpc.agent.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from hvlike.rpc.api import (
    Statistics,
    _all_gather,
    _barrier,
    _get_debug_info,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    statistics,
)
from hvlike.rpc.lifecycle import init_rpc, shutdown
from hvlike.rpc.optimizer import DistributedOptimizer
from hvlike.rpc.remote_module import RemoteModule
from hvlike.rpc.rrefs.rref import RRef, remote
from hvlike.rpc.rrefs.session import LiveRRef
from hvlike.rpc.wire.message import WorkerInfo
from hvlike.untraced import keep_untraced


def is_available() -> bool:
    """Return True: where hvlike runs, so does RPC.

    Source: torch.distributed.rpc.is_available.
    """
    return True


__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "LiveRRef",
    "RRef",
    "RemoteModule",
    "RpcBackendOptions",
    "Statistics",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_set_rpc_timeout",
    "_wait_all",
    "api",
    "constants",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "statistics",
]

keep_untraced(globals())
