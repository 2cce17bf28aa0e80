"""The user's model (--model): its gradients, the buckets they go in, and where these need memory."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from hvlike.collectives.requests import plan
from hvlike.doctor.finding import Finding, in_bytes, plural
from hvlike.doctor.machine import LARGEST_RING, ring_bytes
from hvlike.doctor.probe import known
from hvlike.errors import UsageError
from hvlike.transport.host import topology

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_PART = 1 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Model:
    """The gradients that a training step of it reduces."""

    name: str
    sizes: tuple[int, ...]  # Bytes of each gradient, in the order in which backward brings them
    dtypes: tuple[str, ...]


def collect_model(text: str) -> Model:
    """Read a number of float32 parameters (25000000, 25_000_000, 25e6), or run FILE.py:function, the user's code.

    Raises: UsageError for what is neither, or makes no torch.nn.Module.
    """
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        count = 0
    if count >= 1:
        whole, rest = divmod(count, _PART)
        parts = [_PART] * whole + [rest] * (rest > 0)
        sizes = tuple(_FLOAT_BYTES * part for part in parts)
        return Model(f"{count:,} float32 parameters", sizes, ("float32",) * len(parts))
    path, colon, name = text.rpartition(":")
    if not colon or not Path(path).is_file():
        raise UsageError(
            f"--model {text}: expected a number of parameters, or FILE.py:function with a file that exists."
        )
    made = getattr(_load_module(Path(path)), name, None)
    model = made() if callable(made) else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {text}: {name} makes {type(model).__name__}, expected a torch.nn.Module.")
    trained = [each for each in model.parameters() if each.requires_grad]
    trained.reverse()
    return Model(
        f"{type(model).__name__} of {path}",
        tuple(each.nbytes for each in trained),
        tuple(str(each.dtype).removeprefix("torch.") for each in trained),
    )


def _load_module(path: Path) -> object:
    """The module of a file; what it imports may lie beside it."""
    specification = importlib.util.spec_from_file_location("hvlike_doctor_model", path)
    if specification is None or specification.loader is None:
        raise UsageError(f"--model {path}: not a Python file.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    specification.loader.exec_module(module)
    return module


def check_model(case: Case) -> Finding:
    if case.model is None:
        return Finding.skip("no model was named: --model FILE.py:function, or --model 25e6 for so many parameters")
    model, memory = known(case.model), known(case.me.memory)
    local, total = len(case.nodes[0]), sum(model.sizes)
    buckets = _bucket_bytes(case, model)
    ring = ring_bytes(local, LARGEST_RING) if local > 1 else 0
    finding = Finding(
        f"{model.name}: {in_bytes(total)} of gradients in {plural(len(buckets), 'bucket')}, the largest of "
        f"{in_bytes(max(buckets, default=0))}",
    )
    staged = f"they are staged through a ring of {in_bytes(ring)} a node, whatever their size"
    finding.note(staged if ring else "one rank a node")
    if memory.available is not None and ring > memory.available:
        text = f"the ring needs {in_bytes(ring)} of memory, {in_bytes(memory.available)} are left"
        finding.fail(text, "Raise the memory limit of the container, or start fewer ranks on this node.")
    room = memory.available if memory.memfd else memory.free
    if room is not None and local > 1:
        needed = in_bytes(local * total)
        finding.note(f"gradients in hvd.empty_shared would need {needed} a node; there are {in_bytes(room)}")
    return finding


def _bucket_bytes(case: Case, model: Model) -> list[int]:
    """Return the bytes of the buckets, with all settings at their defaults."""
    processors = [known(case.ranks[rank].processor) for rank in case.nodes[0]]
    share = topology.cores_per_rank([each.allowed for each in processors], 0)
    sizes = plan.choose_sizes(None, None, overlaps=topology.has_spare_core(share))
    parts = [[index] for index in range(len(model.sizes))]
    buckets = plan.fill_buckets(parts, model.sizes, model.dtypes, *sizes)
    return [sum(model.sizes[index] for index in bucket) for bucket in buckets]
