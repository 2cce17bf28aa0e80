"""The importer of Horovod's modules: each is made of hvlike's own objects, as MODULES says.

MODULES: module of Horovod -> module of hvlike -> the names that the former takes from the latter.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from hvlike.config import HOROVODS_OWN
from hvlike.errors import StateError

logger = logging.getLogger("hvlike")

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
        "hvlike.horovod.stand_ins": _OPTIMIZERS,
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
    "horovod.torch.optimizer": {"hvlike.horovod.stand_ins": _OPTIMIZERS},
    "horovod.torch.sync_batch_norm": {"hvlike": "SyncBatchNorm"},
}

LIGHTNING = {
    "lightning.pytorch": "hvlike.integrations.lightning",
    "pytorch_lightning": "hvlike.integrations.pytorch_lightning",
}
"""Which module of hvlike has the HorovodStrategy of a package: Lightning had one until version 2."""

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


def install() -> None:
    """Have `import horovod.torch`, and Horovod's other modules for PyTorch, find hvlike. Local; does not block.

    Every rank calls it, before it imports horovod and before init(). It sets HVLIKE_GRADIENTS=horovod unless the
    environment has that variable: programs keep the gradients that they were written with. A second call does nothing.

    Raises:
        StateError: If hvlike is running, or Horovod itself is imported already.

    Example:
        >>> import hvlike.horovod
        >>> hvlike.horovod.install()
        >>> import horovod.torch as hvd
    """
    if any(isinstance(each, HorovodImporter) for each in sys.meta_path):
        return
    from hvlike.collectives.session.context import is_running

    if is_running() or "horovod" in sys.modules:
        what = "hvlike is running" if is_running() else "Horovod itself is imported"
        raise StateError(f"hvlike.horovod.install(): {what} already. Call it at the top of the program.")
    os.environ.setdefault("HVLIKE_GRADIENTS", HOROVODS_OWN)
    sys.meta_path.insert(0, HorovodImporter())
    for package in LIGHTNING.keys() & sys.modules.keys():
        _bring_strategy(package)


class HorovodImporter(MetaPathFinder, Loader):
    """Finds and fills the modules of the table, refuses the rest of Horovod, and adds to Lightning what it had."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in LIGHTNING:
            return self._followed_by(_bring_strategy, fullname, path, target)
        if fullname in LIGHTNING.values():
            return self._followed_by(_register_strategy, fullname, path, target)
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(_refusal(fullname), name=fullname)
        # Every one is a package: Python itself refuses what is inside of other modules, and says nothing of hvlike.
        return spec_from_loader(fullname, self, origin="hvlike", is_package=True)

    def _followed_by(
        self, action: Callable[[str], None], name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The spec of somebody else's module, after whose import `action` is called with its name."""
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def execute_and_act(module: ModuleType) -> None:
                # Of this import alone: modules of an archive share one loader.
                del vars(loader)["exec_module"]
                loader.exec_module(module)
                action(name)

            vars(loader)["exec_module"] = execute_and_act
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        for place, names in MODULES[module.__name__].items():
            source = import_module(place)
            for name in names.split():
                setattr(module, name, getattr(source, name))
        # As with Horovod, `import horovod` alone loads nothing of a framework; horovod.torch brings what is inside.
        for child in _children(module.__name__):
            if child not in ("horovod.torch", "horovod.common"):
                import_module(child)


def _bring_strategy(package: str) -> None:
    """Import hvlike's strategy for a package of Lightning, unless that has its own, as until version 2."""
    strategies = sys.modules.get(f"{package}.strategies")
    # What is being imported already, and has asked for Lightning, is registered when it is through.
    if strategies is None or hasattr(strategies, "HorovodStrategy"):
        return
    if LIGHTNING[package] in sys.modules:
        _register_strategy(LIGHTNING[package])
        return
    try:
        import_module(LIGHTNING[package])
    except ImportError as error:
        # Most programs do not need it.
        logger.warning('Trainer(strategy="horovod") of %s cannot be served: %s', package, error)


def _register_strategy(place: str) -> None:
    """Let `Trainer(strategy="horovod")` and `strategies.HorovodStrategy` mean hvlike."""
    (package,) = (each for each, ours in LIGHTNING.items() if ours == place)
    strategy = getattr(sys.modules[place], "HorovodStrategy", None)
    if strategy is not None:
        strategies = sys.modules[f"{package}.strategies"]
        setattr(strategies, strategy.__name__, strategy)
        strategy.register_strategies(strategies.StrategyRegistry)


def _children(name: str) -> list[str]:
    return [each for each in MODULES if each.rpartition(".")[0] == name]


def _refusal(name: str) -> str:
    part = name.split(".")[1]
    served = ", ".join(each for each in MODULES if each.count(".") == 1)
    return f"hvlike stands in for Horovod here and has no {name!r}; it serves {served}. {REFUSED.get(part, '')}".strip()
