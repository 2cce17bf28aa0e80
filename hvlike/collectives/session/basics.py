"""init, shutdown, who and where this rank is, which GPU it uses, and what this installation can do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from hvlike.collectives.health.departures import Ending
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session import context
from hvlike.errors import LaunchError, UsageError, WrongTypeError
from hvlike.untraced import traced


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None, gradients: str | None = None
) -> None:
    """Start hvlike in this process; does nothing while it is running.

    Collective: every rank of `comm` calls it. Blocks until all have. Without mpirun this is a job of one rank.

    Args:
        comm: None for all ranks of the job; a list of world ranks that form a job of their own (each rank passes its
            own list); or an mpi4py communicator, which is duplicated.
        process_sets: ProcessSets to register at once, the same on every rank; "dynamic" is accepted, as in Horovod.
        gradients: "adjoint" or "horovod", the same on every rank: the value of HVLIKE_GRADIENTS, which it overrides.

    Raises:
        LaunchError: If launcher and MPI disagree.
        UsageError: On every rank, for wrong arguments or settings (a ValueError).

    Example:
        >>> import hvlike as hvd
        >>> hvd.init()

    Source: horovod.torch.init.
    """
    sets: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise UsageError(f'init: process_sets expects a list of ProcessSet or "dynamic", got {process_sets!r}.')
    elif process_sets is not None:
        sets = list(process_sets)
        for each in sets:
            if not isinstance(each, ProcessSet):
                raise WrongTypeError(f"init: process_sets expects ProcessSet objects, got {type(each).__name__}.")
    context.start_context(comm, sets, gradients)


def shutdown() -> None:
    """End hvlike in this process; `init()` may follow. Does nothing when it is not running.

    Collective in effect: unfinished operations of other ranks fail with ShutdownError. Blocks until all ranks have
    called it or ended. MPI itself stays up: it can be started only once in a process.

    Raises:
        PeerLeftError: The process of another rank was lost, and the launcher has not ended the job.
        StalledError: Other ranks have not come for HVLIKE_STALL_SHUTDOWN_TIME_SECONDS.

    Source: horovod.torch.shutdown.
    """
    context.end_context(Ending.SHUTDOWN)


@traced
def is_initialized() -> bool:
    """True between init() and shutdown()."""
    return context.is_running()


@traced
def size() -> int:
    """Return the number of ranks in the job. Raises: NotInitializedError (a ValueError)."""
    return context.current().place.size


@traced
def rank() -> int:
    """Return the number of this rank in the job. Raises: NotInitializedError (a ValueError)."""
    return context.current().place.rank


@traced
def local_size() -> int:
    """Return the number of ranks on this node. Raises: NotInitializedError (a ValueError)."""
    return context.current().place.local_size


@traced
def local_rank() -> int:
    """Return the number of this rank among those of its node. Raises: NotInitializedError (a ValueError)."""
    return context.current().place.local_rank


@traced
def cross_size() -> int:
    """Return the number of nodes that have this local rank. Raises: NotInitializedError (a ValueError)."""
    return context.current().place.cross_size


@traced
def cross_rank() -> int:
    """Return the number of this rank among those with its local rank. Raises: NotInitializedError (a ValueError)."""
    return context.current().place.cross_rank


@traced
def is_homogeneous() -> bool:
    """True when every node has the same number of ranks. Raises: NotInitializedError (a ValueError)."""
    return context.current().world.homogeneous


def mpi_threads_supported() -> bool:
    """True when MPI was started with THREAD_MULTIPLE. Raises: NotInitializedError (a ValueError)."""
    world = context.current().world
    return bool(world.thread_level >= world.mpi.THREAD_MULTIPLE)


def pin_device(kind: str = "cuda") -> torch.device:
    """Make one GPU the current one of this rank, chosen by its local rank. Local; needs init().

    The GPUs that this process sees are dealt in turn: where a node has more ranks than GPUs, several ranks share one. A
    rank that sees a single GPU, because its launcher has set CUDA_VISIBLE_DEVICES, gets that. Call it before anything
    is put on a GPU: what comes first would be in the memory of GPU 0, on every rank.

    Args:
        kind: "cuda" (GPUs of NVIDIA, and of AMD with a torch for ROCm), or another kind of device that this torch was
            built for, such as "xpu"; or "cpu", which changes nothing, for programs that leave the choice to their user.

    Returns:
        The torch.device with its number, e.g. cuda:1; for "cpu" the CPU.

    Raises:
        UsageError: For a kind that this torch does not have (a ValueError).
        LaunchError: If this process sees no GPU, with the reason.
        NotInitializedError: Before init().

    Example:
        >>> model.to(hvd.pin_device())

    Source: torch.cuda.set_device(hvd.local_rank()), as Horovod's examples have it.
    """
    from hvlike.backends.cuda.runtime import KINDS

    if kind not in ("cpu", *KINDS):
        known = ", ".join(repr(each) for each in (*KINDS, "cpu"))
        raise UsageError(f"pin_device: expected one of the kinds that this torch was built for, {known}, got {kind!r}.")
    number = local_rank()
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.cuda if kind == "cuda" else torch.get_device_module(kind)
    count = module.device_count()
    if not count:
        raise LaunchError(
            f"pin_device: local rank {number} sees no {_NOUNS.get(kind, kind)}: torch {torch.__version__} was built "
            f"{_built_for(kind)}. {_check_of(kind)}Or run on the CPU (pin_device('cpu'))."
        )
    device = torch.device(kind, device_index(number, count))
    module.set_device(device)
    return device


_NOUNS = {"cuda": "GPU"}


def _check_of(kind: str) -> str:
    if kind != "cuda":
        return ""
    if torch.version.hip is not None:
        return "Check HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and rocm-smi on this host. "
    return "Check CUDA_VISIBLE_DEVICES and nvidia-smi on this host. "


def _built_for(kind: str) -> str:
    if kind != "cuda":
        return f"for {kind}, but finds no device"
    if torch.version.hip is not None:
        return f"for ROCm {torch.version.hip}, but finds no device"
    return "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}, but finds no device"


def device_index(local_rank: int, gpus: int) -> int:
    """The number of the GPU of a local rank among those that it sees: 0, 1, 2, 0, 1, ... Pure function."""
    return local_rank % gpus


_TORCH_NAMES = ("torch", "horovod.torch", "hvlike", "hvlike.torch")


def mpi_built() -> bool:
    """True when mpi4py is installed. Local, also before init(), does not load MPI. Source: horovod.torch.mpi_built."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """True when ranks communicate through MPI: wherever it is installed. Local. Source: horovod.torch.mpi_enabled."""
    return mpi_built()


def gloo_built() -> bool:
    """False: MPI and shared memory take its place. Local. Source: horovod.torch.gloo_built."""
    return False


def gloo_enabled() -> bool:
    """False: ranks never agree through Gloo. Local. Source: horovod.torch.gloo_enabled."""
    return False


def nccl_built() -> int:
    """The version code of the NCCL that collectives can use, 22703 for 2.27.3; 0 where CuPy or NCCL is missing. Local.

    Returns an int, so that `if hvd.nccl_built()` reads as in Horovod. Loads CuPy, does not start a GPU.
    Source: horovod.torch.nccl_built.
    """
    from hvlike.backends.cuda.nccl import describe

    return describe().version


def ddl_built() -> bool:
    """False: hvlike has no operations of IBM's DDL. Local. Source: horovod.torch.ddl_built."""
    return False


def ccl_built() -> bool:
    """False: hvlike has no operations of oneCCL. Local. Source: horovod.torch.ccl_built."""
    return False


def cuda_built() -> bool:
    """True when torch was built with CUDA; does not start it. Local. Source: horovod.torch.cuda_built."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True when torch was built with ROCm. Local, does not start a GPU. Source: horovod.torch.rocm_built."""
    return torch.version.hip is not None


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise unless the extension for a framework is there. Local.

    Args:
        ext_name: "horovod.torch", "hvlike" and "torch" are there, as hvlike is pure Python; other frameworks are not.
        ext_env_var: What Horovod's build needs to know; ignored.
        pkg_path: Ignored, too.
        args: Ignored, too.

    Raises:
        ImportError: If it is not there; the text names it.

    Source: horovod.common.util.check_extension.
    """
    if not extension_available(ext_name):
        raise ImportError(
            f"Extension {ext_name} has not been built: hvlike serves PyTorch only. Expected one of "
            f"{', '.join(_TORCH_NAMES)}."
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Say whether a framework is served. Local.

    Args:
        ext_base_name: The name of a framework, as in `check_extension`.
        verbose: Accepted for compatibility with Horovod and ignored.

    Returns:
        True for PyTorch under any of its names, False for every other framework.

    Source: horovod.common.util.extension_available.
    """
    return ext_base_name in _TORCH_NAMES


def _check_has_gpu() -> bool:
    """True when torch finds a GPU it can use in this process. Local. Source: horovod.torch._check_has_gpu."""
    return torch.cuda.is_available()
