"""The names that programs take from `torch.distributed.rpc.api`."""

from hvlike.rpc.accessors import _get_debug_info, _set_rpc_timeout, get_rpc_timeout, get_worker_info
from hvlike.rpc.agent import current as _get_current_rpc_agent
from hvlike.rpc.agent import is_running as _is_current_rpc_agent_set
from hvlike.rpc.calls import rpc_async, rpc_sync
from hvlike.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from hvlike.rpc.gathering import _all_gather, _barrier, _wait_all
from hvlike.rpc.lifecycle import init_rpc, shutdown
from hvlike.rpc.rref import RRef
from hvlike.rpc.rrefs import remote
from hvlike.rpc.rrefs import set_leak_checking as _set_leak_checking
from hvlike.rpc.worker_info import WorkerInfo

__all__ = [
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
    "RRef",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_is_current_rpc_agent_set",
    "_set_leak_checking",
    "_set_rpc_timeout",
    "_wait_all",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
