"""The settings (knobs): every environment variable hvlike reads, in one table, read once by init().

A setting NAME is set by HVLIKE_NAME, or by HOROVOD_NAME where Horovod has it too.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from hvlike.errors import UsageError
from hvlike.version import page

T = TypeVar("T")

OURS, HOROVODS = "HVLIKE_", "HOROVOD_"


class VariableKind(NamedTuple):
    """The values that a setting takes."""

    parse: Callable[[str], Any]  # Returns the value of a text. Raises: ValueError, KeyError.
    expected: str  # The values in words, for errors and the documentation


@dataclass(frozen=True)
class Setting:
    """One setting. name: the environment variable without its prefix."""

    name: str
    kind: VariableKind
    default: Any
    effect: str
    horovod: bool  # Whether Horovod has it too, so that its spelling is accepted
    same: bool  # Whether all ranks must have the same value

    @property
    def variable(self) -> str:
        return OURS + self.name

    @property
    def spellings(self) -> tuple[str, ...]:
        """The environment variables that set it, hvlike's first."""
        return (OURS + self.name, HOROVODS + self.name) if self.horovod else (OURS + self.name,)


def setting(
    default: T, kind: VariableKind, effect: str, *, horovod: bool = False, same: bool = True, name: str | None = None
) -> T:
    """Return a field of Config. name: where the variable has not the field's."""
    entry = Setting(name or "", kind, default, effect, horovod, same)
    return dataclasses.field(default=default, metadata={"setting": entry})


def shared(default: T, kind: VariableKind, effect: str, *, same: bool = True, name: str | None = None) -> T:
    """Return a field of Config that Horovod has too."""
    return setting(default, kind, effect, horovod=True, same=same, name=name)


def _checked(convert: Callable[[str], Any], fits: Callable[[Any], bool], text: str) -> Any:
    value = convert(text)
    if not fits(value):
        raise ValueError(text)
    return value


def whole(least: int) -> VariableKind:
    return VariableKind(partial(_checked, int, lambda value: value >= least), f"a whole number of at least {least}")


def number(least: float) -> VariableKind:
    """Finite numbers from `least` up."""
    return VariableKind(
        partial(_checked, float, lambda value: least <= value < math.inf), f"a number of at least {least:g}"
    )


def one_of(*words: str) -> VariableKind:
    """One of some words, in upper or lower case."""
    return VariableKind(partial(_checked, str.lower, lambda value: value in words), "one of " + ", ".join(words))


SWITCH = VariableKind({"0": False, "1": True}.__getitem__, "0 or 1")
PATH = VariableKind(str, "the path of a file")
CORES = VariableKind(
    partial(_checked, lambda text: tuple(map(int, text.split(","))), lambda cores: min(cores) >= 0),
    "comma-separated numbers of cores, one for each rank of a node",
)
LEVELS = one_of("trace", "debug", "info", "warning", "error", "fatal")
ADJOINT, HOROVODS_OWN = "adjoint", "horovod"  # HVLIKE_GRADIENTS
DYNAMIC = "DYNAMIC"  # HVLIKE_TIMELINE that names no file: the program calls start_timeline(), as with Horovod


@dataclass(frozen=True)
class Config:
    """The values of this run, and the table of all settings."""

    # Where the ranks run
    ranks_per_node: int | None = setting(
        None, whole(1), "treat every N ranks of a host as a node of their own, for tests"
    )
    mpi_threads_disable: bool = shared(False, SWITCH, "1: ask MPI for THREAD_SERIALIZED, not THREAD_MULTIPLE")
    thread_affinity: tuple[int, ...] | None = shared(
        None, CORES, "the core of the background thread of each local rank", same=False
    )
    peer_memory: bool = setting(True, SWITCH, "0: a rank does not read or write the memory of another one directly")
    keep_memory: bool = setting(
        False, SWITCH, "1: the process keeps freed memory instead of giving it back to the system"
    )
    # What happens when a rank is lost
    spares: int = setting(0, whole(0), "how many of the last processes wait to replace lost ranks")
    min_ranks: int = setting(1, whole(1), "elastic.run ends when fewer ranks are left")
    # How operations are agreed and joined
    cycle_time: float = shared(
        0.0, number(0), "milliseconds for which rank 0 collects operations before it announces them"
    )
    fusion_threshold: int = shared(64 << 20, whole(0), "bytes of operations that run as one; 0: each runs alone")
    cache_capacity: int = shared(
        4096, whole(0), "how many operations the ranks remember, to send a number in place of a description"
    )
    # Gradients
    gradients: str = setting(
        ADJOINT,
        one_of(ADJOINT, HOROVODS_OWN),
        "what collectives return in backward: the derivative, or what Horovod returns (default if you import horovod)",
    )
    overlap: bool | None = setting(
        None, SWITCH, "1: reduce gradients during backward; 0: after it; unset: 1 if a core is free"
    )
    bucket_bytes: int | None = setting(
        None, whole(1), "bytes of gradients that are reduced together; unset: hvlike chooses"
    )
    first_bucket_bytes: int | None = setting(None, whole(1), "bytes of the first bucket; unset: as for the others")
    # Restarts and preemption
    checkpoint_dir: str | None = setting(
        None, PATH, "the folder into which elastic.run writes commits; it starts from the newest one"
    )
    checkpoint_seconds: float = setting(
        60.0, number(0), "seconds between commits that are written to disk; 0: every commit is written"
    )
    launch_record: str | None = setting(None, PATH, "set by python -m hvlike launch", same=False)
    # Tensors of a GPU
    cuda_plane: str = setting(
        "auto",
        one_of("auto", "nccl", "staged"),
        "how CUDA tensors travel: nccl, or through host memory; auto: nccl if each rank has its own GPU and CuPy",
    )
    nccl_timeout: float = setting(
        600.0, number(0), "seconds after which a collective of NCCL fails; 0: never", name="NCCL_TIMEOUT_SECONDS"
    )
    # Autotune
    autotune: bool = shared(False, SWITCH, "1: try several bucket sizes during training, and keep the fastest")
    autotune_log: str | None = shared(None, PATH, "rank 0 writes every sample there, as CSV", same=False)
    autotune_steps_per_sample: int = shared(10, whole(1), "training steps measured for one sample")
    # What the user is told
    stall_check_disable: bool = shared(False, SWITCH, "1: do not report ranks that wait long")
    stall_check_seconds: float = shared(
        60.0,
        number(1),
        "seconds of waiting, in init() too, before a warning names the missing ranks",
        name="STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_seconds: float = shared(
        0.0, number(0), "seconds of waiting before StalledError; 0: never", name="STALL_SHUTDOWN_TIME_SECONDS"
    )
    heartbeat_seconds: float | None = setting(
        None,
        number(0),
        "seconds of silence after which a node is lost; 0: never; unset: 30 on several nodes under --with-ft ulfm, "
        "else never",
    )
    log_level: str | None = shared(None, LEVELS, "the level of the logger hvlike, as printed", same=False)
    log_hide_time: bool = shared(False, SWITCH, "1: the printed log has no time stamps", same=False)
    timeline: str | None = shared(None, PATH, "record a timeline into this file (DYNAMIC: not at once)", same=False)
    timeline_mark_cycles: bool = shared(False, SWITCH, "1: the timeline shows every announcement", same=False)
    timeline_max_bytes: int = setting(256 << 20, whole(4096), "bytes after which the file of a rank ends", same=False)


# By field of Config.
SETTINGS: dict[str, Setting] = {
    field.name: dataclasses.replace(entry, name=entry.name or field.name.upper())
    for field in dataclasses.fields(Config)
    for entry in [field.metadata["setting"]]
}
_IGNORED_BECAUSE = {
    "process sets are always dynamic": "DYNAMIC_PROCESS_SETS",
    "the way is chosen from where the ranks run": ("HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE"),
    "MPI is the only transport": "CONTROLLER CPU_OPERATIONS",
    "the backend chooses its pieces": "ADASUM_MPI_CHUNK_SIZE",
    "a few bucket sizes are tried in turn": (
        "AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
    ),
    "groups may be fused: no result changes by it": "DISABLE_GROUP_FUSION",
    "for Horovod's GPU streams and kernels": (
        "NUM_NCCL_STREAMS BATCH_D2D_MEMCOPIES ENABLE_ASYNC_COMPLETION DISABLE_NVTX_RANGES ENABLE_XLA_OPS"
    ),
    "for Gloo; mpirun numbers the ranks": (
        "GLOO_IFACE GLOO_TIMEOUT_SECONDS GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT HOSTNAME RANK SIZE LOCAL_RANK "
        "LOCAL_SIZE CROSS_RANK CROSS_SIZE SECRET_KEY"
    ),
    "mpirun starts the ranks": "ELASTIC ELASTIC_TIMEOUT START_TIMEOUT",
}
IGNORED = {HOROVODS + name: reason for reason, names in _IGNORED_BECAUSE.items() for name in names.split()}
"""Horovod's variables that have no meaning here, and why."""
# Known, and nothing to speak of: those of Horovod's build and of its launcher for Spark, and of hvlike's own commands.
_OTHER_NAMES = re.compile(
    "HVLIKE_HOROVOD_PROGRAM|HVLIKE_TEST_.*|HOROVOD_(GPU|MIXED_INSTALL|CMAKE|SKIP_COMPILE|DEBUG|ALLOW_MIXED_GPU_IMPL|"
    "LOCAL_VERSION|MPI|GLOO|CCL|MPICXX_SHOW|(WITH|WITHOUT|GPU|NCCL|CUDA|ROCM|NVTX|CCL|BUILD|SPARK|TEST)_.*)"
)


def read_config(environment: Mapping[str, str]) -> Config:
    """Return the settings of `environment`, the others at their defaults.

    Raises: UsageError for a wrong value, and for two spellings that differ. The text names variable, value and what was
        expected.
    """
    values = {field: _value(entry, environment) for field, entry in SETTINGS.items()}
    return Config(**{field: value for field, value in values.items() if value is not None})


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a text for each variable that is set and looks like a setting, but is none: what may have been meant."""
    known = {spelling: entry for entry in SETTINGS.values() for spelling in entry.spellings}
    found = {}
    for name in sorted(environment):
        is_known = name in known or name in IGNORED or _OTHER_NAMES.fullmatch(name)
        if environment[name] and name.startswith((OURS, HOROVODS)) and not is_known:
            found[name] = f"{name} is set, but there is no such setting{_meant(name)}"
    return found


def _meant(name: str) -> str:
    by_name = {entry.name: entry for entry in SETTINGS.values()}
    prefix, _, rest = name.partition("_")
    close = difflib.get_close_matches(rest, by_name, n=1, cutoff=0.7)
    if not close:
        return f": {page('knobs')} has the names of all"
    same_prefix = [each for each in by_name[close[0]].spellings if each.startswith(prefix)]
    return f": did you mean {(same_prefix or [by_name[close[0]].variable])[0]}?"


def _value(entry: Setting, texts: Mapping[str, str]) -> Any:
    """Return the value that `texts` give a setting, None if they give none. An empty text gives none."""
    found = {}
    for spelling in entry.spellings:
        text = texts.get(spelling, "").strip()
        if text:
            try:
                found[spelling] = entry.kind.parse(text)
            except (ValueError, KeyError):
                raise UsageError(f"{spelling}={text!r}: expected {entry.kind.expected}.") from None
    values = list(found.values())
    if any(value != values[0] for value in values):
        values_given = " but ".join(f"{spelling}={texts[spelling]}" for spelling in found)
        raise UsageError(f"{values_given}: two spellings of one knob differ. Set only one of them.")
    return values[0] if values else None


def differing(configs: Sequence[Config]) -> str | None:
    """Return a text with the variables, values and ranks that differ; None if the settings of all ranks agree.

    configs: by rank.
    """
    differences = []
    for field, entry in SETTINGS.items():
        ranks_of: dict[Any, list[int]] = {}
        for rank, each in enumerate(configs):
            ranks_of.setdefault(getattr(each, field), []).append(rank)
        if entry.same and len(ranks_of) > 1:
            values = ", ".join(f"{_show(value)} on {_name(ranks)}" for value, ranks in ranks_of.items())
            differences.append(f"{entry.variable} is {values}")
    told = "; ".join(differences)
    advice = "Set them alike on every rank (mpirun -x NAME=value)."
    return f"The ranks have different knobs: {told}. {advice}" if differences else None


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "unset" if value is None else str(value)


def _name(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    more = f", ... ({len(ranks)} in all)" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
