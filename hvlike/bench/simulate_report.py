"""What bench simulate computes, and how it shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.loggp import AGREEMENTS, REDUCTIONS, Constants, Job, Workload, step
from hvlike.bench.plot import Curves
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size

REDUCTION = "hierarchical"
"""What hvlike does, and with which the steps are computed."""


@dataclass(frozen=True)
class Step:
    """The parts of a step at one number of ranks, in seconds."""

    ranks: int
    nodes: int
    agreement: dict[str, float]
    reduction: dict[str, float]
    total: dict[str, float]
    """With each agreement, and the hierarchical reduction."""
    efficiency: dict[str, float]
    """Computation as a part of the step."""

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


def simulate(constants: Constants, job: Job, work: Workload) -> Step:
    """Compute all parts of a step."""
    total = {name: step(constants, job, work, name, REDUCTION) for name in AGREEMENTS}
    return Step(
        job.ranks,
        job.nodes,
        {name: agree(constants, job, work) for name, agree in AGREEMENTS.items()},
        {name: reduce(constants, job, work.nbytes) for name, reduce in REDUCTIONS.items()},
        total,
        {name: work.compute / seconds for name, seconds in total.items()},
    )


def as_text(constants: Constants, conditions: dict[str, Any], steps: Sequence[Step]) -> str:
    """Constants, table, and what to think of it."""
    work = conditions["workload"]
    head = (
        f"a step of {format_seconds(work['compute'])} with {format_size(int(work['nbytes']))} of gradients in "
        f"{work['tensors']} tensors, {conditions['ranks_per_node']} ranks a node, after the LogGP model"
    )
    header = ["ranks", "nodes", *(f"{name} agreement" for name in AGREEMENTS), *REDUCTIONS]
    header += [f"step, {name}" for name in AGREEMENTS]
    rows = []
    for each in steps:
        row = [str(each.ranks), str(each.nodes)]
        row += [_time(each.agreement[name]) for name in AGREEMENTS]
        row += [_time(each.reduction[name]) for name in REDUCTIONS]
        row += [f"{format_seconds(each.total[name])} ({each.efficiency[name]:.0%})" for name in AGREEMENTS]
        rows.append(row)
    foot = (
        "Agreement and reduction in seconds of one step; step: with the hierarchical reduction, nothing overlapped\n"
        "(computation as a part of it). negotiated: one coordinator takes a message of each rank and answers it,\n"
        f"{work['rounds']} time(s) a step.\n"
        "flat: by messages between all ranks, at the network's speed inside a node, too."
    )
    return "\n\n".join([head, _describe(constants, conditions), table(header, rows), foot])


def panels(steps: Sequence[Step]) -> list[Curves]:
    """Steps and their parts over the number of ranks."""
    ranks = [float(each.ranks) for each in steps]
    labels = [str(each.ranks) for each in steps]
    totals = {name: [1e3 * each.total[name] for each in steps] for name in AGREEMENTS}
    parts = {f"{name} reduction": [1e3 * each.reduction[name] or float("nan") for each in steps] for name in REDUCTIONS}
    parts["negotiated agreement"] = [1e3 * each.agreement["negotiated"] or float("nan") for each in steps]
    return [Curves("step", "ranks", "ms", ranks, totals, labels), Curves("parts", "ranks", "ms", ranks, parts, labels)]


def _describe(constants: Constants, conditions: dict[str, Any]) -> str:
    link = 8e-9 / constants.gap_per_byte if constants.gap_per_byte else float("inf")
    network = f"L {_time(constants.latency)}, link {link:.3g} Gbit/s"
    if conditions["network_measured"]:
        network += (
            " between two ranks of this machine: NO NETWORK was measured, give one with --latency and --bandwidth"
        )
    else:
        network += " as given, in part or in whole, by --latency and --bandwidth"
    return (
        f"network: {network}\n"
        f"measured here: o {_time(constants.overhead)}, g {_time(constants.gap)} a message; "
        f"shared memory {_time(constants.memory_floor)} and {1e-9 / constants.memory:.3g} GB/s for two ranks; "
        f"addition {1e-9 / constants.fold:.3g} GB/s\n"
        f"coordinator: {_time(constants.take)} to take a message and {_time(constants.take_entry)} for each tensor "
        f"in it, {_time(constants.tell)} and {_time(constants.tell_entry)} to send one, "
        f"{constants.entry_bytes:.0f} bytes a tensor"
    )


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"
