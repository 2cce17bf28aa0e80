"""Every name of hvlike, imported: what the package `hvlike` loads when a program uses the first of them."""

from typing import TYPE_CHECKING

from hvlike.backends.operation import Operation as Handle
from hvlike.backends.operation import poll, synchronize
from hvlike.collectives.api.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvlike.collectives.api.alltoall import alltoall, alltoall_async
from hvlike.collectives.api.barrier_join import barrier
from hvlike.collectives.api.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvlike.collectives.api.gather_scatter import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvlike.collectives.api.objects import allgather_object, broadcast_object
from hvlike.collectives.api.process_sets import add_process_set, remove_process_set
from hvlike.collectives.api.shared_tensors import empty_shared
from hvlike.collectives.api.sparse import sparse_allreduce_async
from hvlike.collectives.api.statistics import Statistics, start_timeline, statistics, stop_timeline
from hvlike.collectives.compression import Compression
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.requests.reduction import Adasum, Average, Max, Min, Product, Sum
from hvlike.collectives.session.basics import (
    _check_has_gpu,
    ccl_built,
    check_extension,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    extension_available,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    pin_device,
    rank,
    rocm_built,
    shutdown,
    size,
)
from hvlike.errors import HorovodInternalError, HvlikeError
from hvlike.join import join
from hvlike.training.broadcast import broadcast_optimizer_state, broadcast_parameters
from hvlike.training.distributed_optimizer import DistributedOptimizer, clip_grad_norm_
from hvlike.training.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from hvlike.untraced import keep_untraced
from hvlike.version import __version__

if TYPE_CHECKING:
    # Imported one by one, each at its first use: see hvlike/__init__.py.
    from hvlike import autograd, checkpoint, elastic, horovod, nn, optim, rpc
    from hvlike.launch.run import run
    from hvlike.training.progress import progress

__all__ = ["Adasum", "Average", "Compression", "Max", "Min", "Product", "Sum"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "sparse_allreduce_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather", "allgather_async", "allgather_object", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]
__all__ += ["alltoall", "alltoall_async", "barrier", "join"]
__all__ += ["Handle", "empty_shared", "poll", "synchronize"]
__all__ += ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
__all__ += ["DistributedOptimizer", "SyncBatchNorm", "clip_grad_norm_", "convert_sync_batchnorm"]
__all__ += ["broadcast_optimizer_state", "broadcast_parameters", "progress"]
__all__ += ["Statistics", "start_timeline", "statistics", "stop_timeline"]
__all__ += ["HorovodInternalError", "HvlikeError", "__version__"]
__all__ += ["autograd", "checkpoint", "elastic", "horovod", "nn", "optim", "rpc"]
__all__ += ["init", "is_initialized", "run", "shutdown"]
__all__ += ["cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "pin_device", "rank", "size"]
__all__ += ["_check_has_gpu", "check_extension", "extension_available"]
__all__ += ["gloo_enabled", "mpi_enabled", "mpi_threads_supported"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]

keep_untraced(globals())
