"""What Horovod has and hvlike does not, or calls otherwise; the attributes of its optimizer too."""

from __future__ import annotations

import functools
import pickle
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from hvlike.collectives.compression import Compression, Compressor
from hvlike.collectives.session.basics import _check_has_gpu
from hvlike.errors import UsageError, WrongTypeError
from hvlike.launch.job_folder import pickled
from hvlike.launch.run import run as run_job
from hvlike.training import distributed_optimizer
from hvlike.training.elastic import state
from hvlike.training.elastic.run import run as run_elastic

T = TypeVar("T")

__version__ = "0.28.1"
"""The version of Horovod whose names are served."""


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of the framework. Never raised: hvlike is not built."""


class NoneCompressor(Compressor):
    compress = staticmethod(Compression.none.compress)
    decompress = staticmethod(Compression.none.decompress)


class FP16Compressor(Compressor):
    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)


class State(state.State):
    """Horovod's asks for two functions, which hvlike has."""

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        super().__init__()


class ObjectState(state.ObjectState):
    """Horovod's asks for two functions, which hvlike has."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **objects: Any) -> None:
        super().__init__(**objects)


def run_fn(func: Callable[..., T], reset: Callable[[], object]) -> Callable[..., T]:
    """elastic.run(func); `reset` is not called: elastic.run starts hvlike anew itself."""
    return run_elastic(func)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    return _check_has_gpu()


def is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cut a list into parts, the first ones longer by one where it does not divide."""
    length, longer = divmod(len(values), parts)
    starts = [each * length + min(each, longer) for each in range(parts + 1)]
    return [values[start:stop] for start, stop in pairwise(starts)]


_NOT_NEEDED = ("start_timeout", "disable_cache", "verbose", "use_gloo", "use_mpi")
_SIZE = "the number of ranks is fixed when the job starts"
_FLAG = "pass the flag of mpirun in mpi_args"
_REFUSED = dict.fromkeys(("min_num_proc", "max_num_proc", "min_np", "max_np", "reset_limit", "cooldown_range"), _SIZE)
_REFUSED |= dict.fromkeys(("slots", "host_discovery_script"), f"{_SIZE}; pass hosts or hostfile")
_REFUSED |= dict.fromkeys(("ssh_port", "ssh_identity_file", "output_filename"), _FLAG)
_REFUSED |= dict.fromkeys(("network_interface", "network_interfaces"), _FLAG)
_REFUSED |= {"executable": "the ranks run the Python of this process"}


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    mpi_args: str | None = None,
    **options: Any,
) -> list[T]:
    """horovod.run: `hvlike.run` with Horovod's options, in ranks that find hvlike under the name horovod. Blocks.

    Raises: UsageError for an option that cannot be served, by its name; else what `hvlike.run` raises.
    """
    for name, value in options.items():
        if name not in _NOT_NEEDED and name not in _REFUSED:
            raise WrongTypeError(f"run() got an unexpected keyword argument {name!r}")
        if name in _REFUSED and value:
            raise UsageError(f"horovod.run: {name}={value!r} is not served by hvlike: {_REFUSED[name]}.")
    call = pickled(partial(func, *args, **(kwargs or {})), "run: the function or one of its arguments")
    flags = shlex.split(mpi_args or "")
    ranks = num_proc or np or 1
    return run_job(_call_under_the_name, (call,), np=ranks, hosts=hosts, hostfile=hostfile, mpi_args=flags)


def _call_under_the_name(call: bytes) -> Any:
    """Runs on each rank; reading the call may import horovod."""
    from hvlike.horovod.importer import install

    install()
    return pickle.loads(call)()


_PLACE = "horovod.torch.optimizer"


class DistributedOptimizer(distributed_optimizer.DistributedOptimizer):
    """Programs find Horovod's optimizers by `"horovod" in str(type(optimizer))`; `__class__` is the wrapped one's."""

    __module__ = _PLACE

    @property  # type: ignore[misc]  # as in the class that it is derived from
    def __class__(self) -> type:
        """A class named like the wrapped optimizer's and derived from it, as Horovod makes one."""
        wrapped = self.__dict__.get("_wrapped")
        return type(self) if wrapped is None else _named_class(type(wrapped))  # type: ignore[arg-type]

    @property
    def _handles(self) -> dict[Tensor, tuple[Any, Any]]:
        """Parameters whose gradients are being reduced; not what they are reduced with. A copy."""
        return dict.fromkeys(self._gradients.being_reduced(), (None, None))

    @property
    def _requires_update(self) -> set[Tensor]:
        """Parameters whose gradients are reduced. A copy."""
        return set(self._gradients.parameters.names())

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """A copy."""
        return self._gradients.parameters.names()

    @property
    def _should_synchronize(self) -> bool:
        """Whether step() reduces the gradients: False inside of skip_synchronize(), or when a program sets it."""
        return not self._skipping

    @_should_synchronize.setter
    def _should_synchronize(self, value: bool) -> None:
        self._skipping = not value


_DistributedOptimizer = DistributedOptimizer


@functools.cache
def _named_class(wrapped: Any) -> type:
    return type(wrapped.__name__, (wrapped,), {"__module__": _PLACE})
