"""Data parallelism for PyTorch over MPI, in one line: `import hvlike as hvd`, Horovod's names."""

from typing import TYPE_CHECKING

from hvlike.lazy import at_first_use, without_collections

with without_collections():
    from hvlike.collectives.api.allgather import (
        allgather,
        allgather_async,
        grouped_allgather,
        grouped_allgather_async,
    )
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
    from hvlike.collectives.api.objects import allgather_object, broadcast_object
    from hvlike.collectives.api.process_sets import add_process_set, remove_process_set
    from hvlike.collectives.api.reducescatter import (
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
    )
    from hvlike.collectives.api.shared_tensors import empty_shared
    from hvlike.collectives.api.sparse import sparse_allreduce_async
    from hvlike.collectives.api.statistics import Statistics, start_timeline, statistics, stop_timeline
    from hvlike.collectives.compression import Compression
    from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
    from hvlike.collectives.requests.reduction import Adasum, Average, Max, Min, Product, Sum
    from hvlike.collectives.requests.request import Handle, poll, synchronize
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
    from hvlike.training.elastic.checkpoint import gather_optimizer_state
    from hvlike.training.optimizer.clipping import clip_grad_norm_
    from hvlike.training.optimizer.distributed import DistributedOptimizer
    from hvlike.training.state.broadcast import broadcast_optimizer_state, broadcast_parameters
    from hvlike.training.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from hvlike.version import __version__

if TYPE_CHECKING:
    from hvlike import autograd, checkpoint, elastic, nn, optim, rpc
    from hvlike.launch.run import run
    from hvlike.training.progress import progress
else:
    __getattr__, __dir__ = at_first_use(
        globals(),
        "autograd",
        "checkpoint",
        "elastic",
        "nn",
        "optim",
        "rpc",
        progress="hvlike.training.progress",
        run="hvlike.launch.run",
    )

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "HvlikeError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Statistics",
    "Sum",
    "SyncBatchNorm",
    "__version__",
    "_check_has_gpu",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "autograd",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "checkpoint",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "empty_shared",
    "extension_available",
    "gather_optimizer_state",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "nn",
    "optim",
    "pin_device",
    "poll",
    "progress",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "rpc",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "statistics",
    "stop_timeline",
    "synchronize",
]
