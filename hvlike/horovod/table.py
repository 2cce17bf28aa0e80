"""The modules of Horovod that programs import, and where in hvlike their names are: pure data, read by importer.py.

Module of Horovod -> module of hvlike -> the names that the former takes from the latter.
"""

from __future__ import annotations

_ALLREDUCE = (
    "allreduce allreduce_ allreduce_async allreduce_async_ sparse_allreduce_async "
    "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
)
_OTHERS = (
    "allgather allgather_async grouped_allgather grouped_allgather_async "
    "broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async "
    "reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async "
    "join barrier poll synchronize "
)
_BASICS = (
    "init shutdown is_initialized start_timeline stop_timeline "
    "size local_size cross_size rank local_rank cross_rank mpi_threads_supported "
)
_BUILT = "mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built "
_SETS = "ProcessSet global_process_set add_process_set remove_process_set "
_OPERATIONS = _ALLREDUCE + _OTHERS + _BASICS + _BUILT + _SETS
_OPERATIONS += "mpi_enabled gloo_enabled Average Sum Adasum Min Max Product Compression HorovodInternalError"
_FUNCTIONS = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
_OPTIMIZERS = "DistributedOptimizer _DistributedOptimizer"
_UTILITIES = "gpu_available is_iterable num_rank_is_power_2 split_list"

MODULES: dict[str, dict[str, str]] = {
    "horovod": {"hvlike.horovod.stand_ins": "run __version__"},
    "horovod.runner": {"hvlike.horovod.stand_ins": "run"},
    "horovod.common": {"hvlike": _BASICS},
    "horovod.common.elastic": {
        "hvlike.horovod.stand_ins": "ObjectState State run_fn",
        "hvlike.errors": "HorovodInternalError HostsUpdatedInterrupt",
    },
    "horovod.common.exceptions": {
        "hvlike.errors": "HorovodInternalError HostsUpdatedInterrupt",
        "hvlike.horovod.stand_ins": "HorovodVersionMismatchError",
    },
    "horovod.common.process_sets": {"hvlike": _SETS},
    "horovod.common.util": {
        "hvlike": f"{_BUILT} check_extension extension_available",
        "hvlike.horovod.stand_ins": _UTILITIES,
    },
    "horovod.torch": {
        "hvlike": f"{_OPERATIONS} {_FUNCTIONS} SyncBatchNorm _check_has_gpu",
        "hvlike.horovod.optimizer": _OPTIMIZERS,
    },
    "horovod.torch.compression": {
        "hvlike": "Compression",
        "hvlike.collectives.compression": "Compressor",
        "hvlike.horovod.stand_ins": "FP16Compressor NoneCompressor",
    },
    "horovod.torch.elastic": {"hvlike": "init shutdown", "hvlike.elastic": "ElasticSampler TorchState run"},
    "horovod.torch.elastic.sampler": {"hvlike.elastic": "ElasticSampler"},
    "horovod.torch.elastic.state": {"hvlike.elastic": "ElasticSampler ObjectState TorchState"},
    "horovod.torch.functions": {"hvlike": _FUNCTIONS},
    "horovod.torch.mpi_ops": {
        "hvlike": f"{_OPERATIONS} is_homogeneous check_extension",
        "hvlike.horovod.stand_ins": _UTILITIES,
    },
    "horovod.torch.optimizer": {"hvlike.horovod.optimizer": _OPTIMIZERS},
    "horovod.torch.sync_batch_norm": {"hvlike": "SyncBatchNorm"},
}

_FRAMEWORK = "Programs of other frameworks need Horovod itself."
_LAUNCHER = "Start the ranks with mpirun, a scheduler, or hvlike.run."
REFUSED = {
    "tensorflow": _FRAMEWORK,
    "keras": _FRAMEWORK,
    "_keras": _FRAMEWORK,
    "mxnet": _FRAMEWORK,
    "spark": _LAUNCHER,
    "ray": _LAUNCHER,
    "runner": _LAUNCHER,
    "run": _LAUNCHER,
    "torch": "The rest of horovod.torch is the inside of Horovod.",
}
"""What to do instead, by the part of Horovod that is asked for."""
