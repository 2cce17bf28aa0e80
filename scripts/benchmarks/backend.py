"""bench backend: torch.distributed over hvlike beside the same over gloo, its calls and steps of DDP and FSDP2."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hvlike
from hvlike.bench import step
from hvlike.bench.harness.benchmark import add_common, choice_of, heading
from hvlike.bench.harness.comparison import Contestant, Ratio, Summary, compare, with_samples
from hvlike.bench.harness.report import Bars, parse_sizes, publish, ratio_cell, table, with_spread
from hvlike.bench.peers import Peers, peers
from hvlike.bench.reducers import GLOO, OURS
from hvlike.bench.trainers import ALONE, WORKLOADS, BenchTrainer, ExchangeTrainer, Workload
from hvlike.errors import HvlikeError, UsageError
from hvlike.observe.printing import format_size
from hvlike.torch_distributed.autoload import BACKEND_NAME, register

PURPOSE = "torch.distributed over hvlike beside gloo: its calls, steps of DDP and FSDP2"

DEFAULT_SIZES, DEFAULT_DDP, DEFAULT_FSDP = "1KiB,64KiB,1MiB,4MiB,25MiB", "mlp,small,resnet", "transformer"
_BYTES_PER_SIZE = 512 << 20
_FEWEST, _MOST = 9, 40
_FIRST_TURNS = 3  # Those that do not count
_RATIO = f"{GLOO}/{OURS}"
SILENT = "DDP itself"

distributed: Any = torch.distributed  # Typed one way or the other from version to version
Group = Any


def _all_reduce(whole: Tensor, part: Tensor, group: Group) -> None:
    distributed.all_reduce(whole, group=group)


def _all_gather(whole: Tensor, part: Tensor, group: Group) -> None:
    _newest("all_gather_single", "all_gather_into_tensor")(whole, part, group=group)


def _reduce_scatter(whole: Tensor, part: Tensor, group: Group) -> None:
    _newest("reduce_scatter_single", "reduce_scatter_tensor")(part, whole, group=group)


def _send_and_receive(whole: Tensor, part: Tensor, group: Group) -> None:
    """There and back between two neighbours; a last one without a neighbour waits."""
    rank = hvlike.rank()
    peer = rank ^ 1
    if peer >= hvlike.size():
        return
    first, second = (distributed.send, distributed.recv) if rank < peer else (distributed.recv, distributed.send)
    first(whole, peer, group=group)
    second(whole, peer, group=group)


def _newest(name: str, before: str) -> Callable[..., object]:
    """What torch calls `name` since 2.13; it warns of the name before."""
    found: Callable[..., object] = getattr(distributed, name, None) or getattr(distributed, before)
    return found


# What each of them leaves in the whole tensor or in the part of a rank, where all bring ones.
CALLS: dict[str, tuple[Callable[[Tensor, Tensor, Group], None], Callable[[int], tuple[float, float]]]] = {
    "all_reduce": (_all_reduce, lambda size: (size, 1)),
    "all_gather_into_tensor": (_all_gather, lambda size: (1, 1)),
    "reduce_scatter_tensor": (_reduce_scatter, lambda size: (1, size)),
    "send and recv": (_send_and_receive, lambda size: (1, 1)),
}


@dataclass(frozen=True)
class Result:
    """For one call and size the seconds of each repetition, of the slowest rank, over each backend."""

    call: str
    size: int  # Bytes of the whole tensor
    seconds: dict[str, list[float]]

    @property
    def ratio(self) -> Ratio:
        return Ratio.of(self.seconds, GLOO, OURS)

    def as_json(self) -> dict[str, Any]:
        ratios = {_RATIO: asdict(self.ratio)}
        return {"call": self.call, "bytes": self.size, "seconds": with_samples(self.seconds), "ratios": ratios}


def as_text(conditions: dict[str, Any], calls: Sequence[Result], steps: list[step.StepResult]) -> str:
    rows = []
    for each in calls:
        times = [with_spread(Summary.of(each.seconds[name])) for name in (OURS, GLOO)]
        rows.append([each.call, format_size(each.size), str(len(each.seconds[OURS])), *times, ratio_cell(each.ratio)])
    head = f"torch.distributed, float32, {heading(conditions)}"
    foot = (
        "Size: of the input of all_reduce and reduce_scatter, of the output of all_gather. send and recv: there and\n"
        "back. Times: median over repetitions of the slowest rank, cold caches [interquartile range].\n"
        "Ratios: of medians [quartiles of the ratios within one repetition]."
    )
    silent = f"{SILENT}: a hook that communicates nothing; no backend can cost less."
    parts = [head, table(["call", "size", "n", OURS, GLOO, _RATIO], rows), foot] if calls else []
    return "\n\n".join([*parts, *([step.as_text(conditions, steps), silent] if steps else [])])


def panels(calls: Sequence[Result], steps: list[step.StepResult]) -> list[Any]:
    sizes = [format_size(size) for size in dict.fromkeys(each.size for each in calls)]
    ratios: dict[str, list[Summary]] = {}
    for each in calls:
        ratios.setdefault(each.call, []).append(each.ratio.bar)
    drawn: list[Any] = [Bars("how many times faster than gloo", "ratio", sizes, ratios, line=1.0)] if calls else []
    return drawn + (step.panels(steps) if steps else [])


class FsdpTrainer(BenchTrainer):
    """Each rank keeps a shard of every layer: torch's FSDP2."""

    def __init__(self, name: str, workload: Workload, seed: int, rank: int, group: Group) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(name, workload, seed, rank)
        made: Any = DeviceMesh
        mesh, parts = made.from_group(group, "cpu"), list(self.model.modules())
        blocks: list[nn.Module] = [each for each in parts if isinstance(each, nn.TransformerEncoderLayer)]
        for block in [*(blocks or [each for each in parts if isinstance(each, nn.Linear)]), self.model]:
            fully_shard(block, mesh=mesh)
        # The optimizer that there is has the parameters from before.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.optimizer.defaults["lr"])

    def gradients(self) -> list[Tensor | None]:
        """Whole, on every rank. Collective."""
        return [_whole(each.grad) for each in self.parameters]

    def weights(self) -> list[Tensor]:
        return [_whole(each.detach()) for each in self.parameters]


def _whole(sharded: Any) -> Tensor:
    whole: Tensor = sharded.full_tensor()
    return whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=parse_sizes, default=DEFAULT_SIZES, help="of the calls; default %(default)s")
    known, models = ", ".join(WORKLOADS), choice_of({"none": None, **WORKLOADS}, "model")
    for option, default in (("--ddp", DEFAULT_DDP), ("--fsdp", DEFAULT_FSDP)):
        words = f"models of a step, of {known}, or none; default {default}"
        parser.add_argument(option, type=models, default=models(default), help=words)
    add_common(parser, f"{_MOST} of small calls down to {_FEWEST}; of a step, as bench step")


def run(options: argparse.Namespace) -> int:
    with peers(None, "it is not a backend of torch.distributed") as there:
        if there.backend is None:
            raise UsageError(f"bench backend compares with gloo. {there.left_out[0]}")
        register()  # Where TORCH_DEVICE_BACKEND_AUTOLOAD=0 has kept torch from it
        groups = {OURS: distributed.new_group(backend=BACKEND_NAME), GLOO: distributed.group.WORLD}
        calls = [measure(call, size, groups, there, options) for call in CALLS for size in options.sizes]
        kinds = [("DDP", each, _ddp) for each in options.ddp if each]
        kinds += [("FSDP2", each, FsdpTrainer) for each in options.fsdp if each]
        steps = [_steps(kind, workload, make, groups, there, options) for kind, workload, make in kinds]
        if hvlike.rank() == 0:
            conditions = there.describe("backend")
            document = {
                **conditions,
                "calls": [each.as_json() for each in calls],
                "steps": [each.as_json() for each in steps],
            }
            title = f"torch.distributed on {hvlike.size()} ranks"
            publish(options, document, as_text(conditions, calls, steps), title, panels(calls, steps))
    return 0


def measure(call: str, size: int, groups: dict[str, Group], there: Peers, options: argparse.Namespace) -> Result:
    function, leaves = CALLS[call]
    ranks = hvlike.size()
    part = torch.ones(max(1, size // 4 // ranks))
    whole = torch.ones(ranks * len(part))

    def prepare() -> None:
        whole.fill_(1.0)
        part.fill_(1.0)

    def verify() -> None:
        found = (float(whole.min()), float(whole.max())), (float(part.min()), float(part.max()))
        right = tuple((value, value) for value in leaves(ranks))
        if found != right:
            raise HvlikeError(f"{call} of {size} bytes left {found}, expected {right}.")

    entered = [
        Contestant(name, prepare, partial(function, whole, part, group), verify) for name, group in groups.items()
    ]
    count = options.repetitions or max(_FEWEST, min(_MOST, _BYTES_PER_SIZE // max(size, 1)))
    return Result(call, size, compare(there.raw, entered, count, warmups=_FIRST_TURNS, seed=options.seed))


def _ddp(name: str, workload: Workload, seed: int, rank: int, group: Group) -> BenchTrainer:
    trainer = BenchTrainer(name, workload, seed, rank)
    parallel: Any = nn.parallel.DistributedDataParallel
    trainer.network = parallel(trainer.model, process_group=group)
    return trainer


class SilentTrainer(ExchangeTrainer):
    """DDP with a hook that communicates nothing: what its buckets cost over any backend. The replicas drift apart."""

    def __init__(self, workload: Workload, seed: int, rank: int, group: Group) -> None:
        super().__init__(workload, seed, rank, lambda: None)
        self.name = SILENT
        parallel: Any = nn.parallel.DistributedDataParallel
        self.network = network = parallel(self.model, process_group=group)
        # A lambda: torch refuses annotations that are kept as text.
        network.register_comm_hook(None, lambda state, bucket: _ended(bucket.buffer()))


def _ended(result: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def _steps(
    kind: str,
    workload: Workload,
    make: Callable[[str, Workload, int, int, Group], BenchTrainer],
    groups: dict[str, Group],
    there: Peers,
    options: argparse.Namespace,
) -> step.StepResult:
    rank, seed = hvlike.rank(), options.seed
    trainers = [BenchTrainer(ALONE, workload, seed, rank)]
    trainers += [make(name, workload, seed, rank, group) for name, group in groups.items()]
    if make is _ddp:
        trainers.append(SilentTrainer(workload, seed, rank, groups[GLOO]))
    return step.train(replace(workload, name=f"{kind} {workload.name}"), trainers, there, options)
