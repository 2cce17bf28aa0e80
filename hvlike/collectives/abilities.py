"""What this installation can do: Horovod's questions about how it was built, answered for a library without a build."""

from __future__ import annotations

from importlib.util import find_spec

import torch

_TORCH_NAMES = ("torch", "horovod.torch", "hvlike", "hvlike.torch")


def mpi_built() -> bool:
    """True when mpi4py, through which all messages go, is installed. Local, also before init().

    Returns a bool; does not load MPI. Source: horovod.torch.mpi_built.
    """
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """True when ranks agree and communicate through MPI, which is always so where it is installed. Local.

    Returns a bool. Source: horovod.torch.mpi_enabled.
    """
    return mpi_built()


def gloo_built() -> bool:
    """False: hvlike has no Gloo operations; MPI and shared memory take their place. Local.

    Returns a bool. Source: horovod.torch.gloo_built.
    """
    return False


def gloo_enabled() -> bool:
    """False: ranks never agree through Gloo. Local.

    Returns a bool. Source: horovod.torch.gloo_enabled.
    """
    return False


def nccl_built() -> int:
    """The version code of the NCCL that collectives can use, 22703 for 2.27.3; 0 where CuPy or NCCL is missing. Local.

    Returns an int, so that `if hvd.nccl_built()` reads as in Horovod. Loads CuPy, does not start a GPU.
    Source: horovod.torch.nccl_built.
    """
    from hvlike.planes.nccl import describe

    return describe().version


def ddl_built() -> bool:
    """False: hvlike has no operations of IBM's DDL. Local.

    Returns a bool. Source: horovod.torch.ddl_built.
    """
    return False


def ccl_built() -> bool:
    """False: hvlike has no operations of oneCCL. Local.

    Returns a bool. Source: horovod.torch.ccl_built.
    """
    return False


def cuda_built() -> bool:
    """True when the installed torch was built with CUDA; whether a GPU is there is another question. Local.

    Returns a bool; does not start CUDA. Source: horovod.torch.cuda_built.
    """
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True when the installed torch was built with ROCm. Local.

    Returns a bool; does not start a GPU. Source: horovod.torch.rocm_built.
    """
    return torch.version.hip is not None


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise unless the extension for a framework is there. Local.

    ext_name: "horovod.torch", "hvlike" or "torch" are there, as hvlike is pure Python; other frameworks are not.
    ext_env_var, pkg_path, args: what Horovod's build needs to know; ignored.
    Returns None. Raises: ImportError that names the extension.
    Source: horovod.common.util.check_extension.
    """
    if not extension_available(ext_name):
        raise ImportError(
            f"Extension {ext_name} has not been built: hvlike serves PyTorch only. Expected one of "
            f"{', '.join(_TORCH_NAMES)}."
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True for PyTorch under any of its names, False for every other framework. Local.

    verbose: accepted for Horovod's sake; there is nothing more to say.
    Returns a bool. Source: horovod.common.util.extension_available.
    """
    return ext_base_name in _TORCH_NAMES


def _check_has_gpu() -> bool:
    """True when torch finds a GPU it can use in this process. Local.

    Returns a bool. Source: horovod.torch._check_has_gpu.
    """
    return torch.cuda.is_available()
