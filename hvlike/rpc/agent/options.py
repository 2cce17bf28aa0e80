"""The options of init_rpc, and the numbers of rpc.constants."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from hvlike.errors import UsageError
from hvlike.rpc.wire.devices import DeviceMap, DeviceOffer, device_of, parse_map

DEFAULT_RPC_TIMEOUT_SEC = 60.0  # After which a call without a timeout of its own fails
UNSET_RPC_TIMEOUT = -1.0  # As the timeout of a call: use the default of the moment the call is made
DEFAULT_NUM_WORKER_THREADS = 16  # How many functions of callers run at a time on one worker
DEFAULT_INIT_METHOD = "env://"  # Accepted for compatibility with torch and ignored: MPI has connected the ranks
DEFAULT_SHUTDOWN_TIMEOUT = 0.0  # Seconds that a graceful shutdown waits; 0: no limit


class BackendType(enum.Enum):
    """What torch programs pass as `backend`. Messages go over MPI with either.

    Source: torch.distributed.rpc.BackendType.
    """

    MPI = "mpi"
    TENSORPIPE = "tensorpipe"

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


class RpcBackendOptions:
    """How RPC works on this worker. torch programs know it as TensorPipeRpcBackendOptions, which is the same class.

    Args:
        num_worker_threads: How many functions of callers run at a time on this worker; at least 1.
        rpc_timeout: Seconds until a call without a timeout of its own fails; 0: never.
        init_method: Accepted and ignored: the ranks of an MPI job know each other.
        device_maps: {worker name: {device here: device there}}, GPUs as int, str or torch.device. Where tensors in
            calls to that worker arrive; tensors in its results travel the other way round. A GPU tensor without a map
            is refused.
        devices: GPUs that functions called on this worker use, beside those in the maps.
        cloudpickle: Send functions and classes that cannot be imported by name (lambdas, local ones) with the package
            cloudpickle.
        _transports: Accepted and ignored.
        _channels: Accepted and ignored.

    Raises:
        UsageError: (a ValueError) For a wrong value.

    Source: torch.distributed.rpc.TensorPipeRpcBackendOptions.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str | None = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        cloudpickle: bool = False,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        self.cloudpickle = cloudpickle
        self.device_maps: dict[str, DeviceMap] = {}  # Where this worker's GPU tensors go, by name of the receiver
        self.devices: list[torch.device] = []  # GPUs that functions called on this worker use, beside those in the maps
        self.check()
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or [])

    def check(self) -> None:
        """Check the values; init_rpc does it again, because attributes can be set.

        Raises:
            UsageError: (a ValueError) For a wrong value.
        """
        threads = self.num_worker_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise UsageError(f"RpcBackendOptions: num_worker_threads must be an int of at least 1, got {threads!r}.")
        self.rpc_timeout = checked_timeout("RpcBackendOptions: rpc_timeout", self.rpc_timeout)
        if not isinstance(self.cloudpickle, bool):
            raise UsageError(f"RpcBackendOptions: cloudpickle must be True or False, got {self.cloudpickle!r}.")

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Set where this worker's GPU tensors go on another worker. Adds to the map set before.

        Args:
            to: Name of the other worker.
            device_map: {device here: device there}, GPUs as int, str or torch.device.

        Raises:
            UsageError: (a ValueError) For anything but a GPU, and if the whole map is not one to one.
        """
        what = f"RpcBackendOptions: device map to worker {to!r}"
        self.device_maps[to] = parse_map(what, device_map, self.device_maps.get(to, {}))

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Set which GPUs the functions called on this worker use.

        Args:
            devices: GPUs as int, str or torch.device.

        Raises:
            UsageError: (a ValueError) For anything but a GPU.
        """
        self.devices = [device_of("RpcBackendOptions: devices", each) for each in devices]

    def offer(self) -> DeviceOffer:
        """Return what the other workers have to know about the GPUs here. Does not start CUDA."""
        return DeviceOffer(torch.cuda.device_count(), self.device_maps)

    def __repr__(self) -> str:
        return (
            f"RpcBackendOptions(num_worker_threads={self.num_worker_threads}, rpc_timeout={self.rpc_timeout}, "
            f"cloudpickle={self.cloudpickle})"
        )


TensorPipeRpcBackendOptions = RpcBackendOptions


def checked_timeout(what: str, seconds: object) -> float:
    """Return seconds as a float. Raises: UsageError that begins with `what` unless it is a number of at least 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or math.isnan(seconds) or seconds < 0:
        raise UsageError(f"{what} must be a number of seconds, 0 for no limit, got {seconds!r}.")
    return float(seconds)


def settle_options(
    backend: object, options: object, num_worker_threads: int | None, rpc_timeout: float | None
) -> RpcBackendOptions:
    """Return a copy of the options, with the two arguments in their place if they are given. Raises: UsageError."""
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise UsageError(
            f"init_rpc: backend must be rpc.BackendType.MPI or rpc.BackendType.TENSORPIPE, got {backend!r}. "
            "hvlike sends over MPI in any case: leave it out."
        )
    if options is None:
        options = RpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise UsageError(
            "init_rpc: rpc_backend_options must be hvlike.rpc.RpcBackendOptions (TensorPipeRpcBackendOptions), got "
            f"{type(options).__module__}.{type(options).__name__}."
        )
    settled = copy.deepcopy(options)
    if num_worker_threads is not None:
        settled.num_worker_threads = num_worker_threads
    if rpc_timeout is not None:
        settled.rpc_timeout = rpc_timeout
    settled.check()
    return settled
