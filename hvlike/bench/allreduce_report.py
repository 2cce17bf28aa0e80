"""What bench allreduce has found: for people, for machines, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.bare import BARE
from hvlike.bench.comparison import Ratio, Summary
from hvlike.bench.conditions import heading
from hvlike.bench.plot import Bars, Curves
from hvlike.bench.reducers import COPY, FLOOR, GLOO, HOROVOD, MPI, NCCL, OURS, SHARED, SHARED_FLOOR
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size

RATIOS = {
    "MPI/hvlike": (MPI, OURS),
    "gloo/hvlike": (GLOO, OURS),
    "NCCL/hvlike": (NCCL, OURS),
    "Horovod/hvlike": (HOROVOD, OURS),
    "MPI/bare": (MPI, BARE),
    "hvlike/bare": (OURS, BARE),
    "hvlike/pass": (OURS, FLOOR),
    "hvlike/memcpy": (OURS, COPY),
    "MPI/shared": (MPI, SHARED),
    "shared/pass": (SHARED, FLOOR),
    "shared/own pass": (SHARED, SHARED_FLOOR),
}
"""Above 1 where others come first: hvlike is faster; where hvlike comes first: how far it is from the floor."""


@dataclass(frozen=True)
class Result:
    """What came out for one size: seconds per repetition for each contestant, the slowest rank each time."""

    dtype: str
    size: int
    seconds: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Those of RATIOS whose contestants took part."""
        return {
            name: Ratio.of(self.seconds, above, below)
            for name, (above, below) in RATIOS.items()
            if above in self.seconds and below in self.seconds
        }

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        summaries = {name: {**asdict(Summary.of(each)), "samples": each} for name, each in self.seconds.items()}
        ratios = {name: asdict(each) for name, each in self.ratios.items()}
        return {"dtype": self.dtype, "bytes": self.size, "seconds": summaries, "ratios": ratios}


def as_text(conditions: dict[str, Any], results: Sequence[Result]) -> str:
    """Two tables a dtype, times and ratios, with head and foot."""
    parts = [f"allreduce of one tensor, op {conditions['op']}, in place, {heading(conditions)}"]
    for dtype, found in by_dtype(results).items():
        names, ratios = list(found[0].seconds), list(found[0].ratios)
        parts.append(table([dtype, "n", *names], [_times(result, names) for result in found]))
        parts.append(table([f"{dtype} ratios", *ratios], [_ratios(result, ratios) for result in found]))
    foot = (
        f"Times: median over repetitions of the slowest rank, {conditions['caches']} caches [interquartile range].\n"
        "Ratios: of medians [quartiles of the ratios within one repetition]. A pass reads and writes every byte once,\n"
        "in place; memcpy into other memory; both on all ranks at once. shared: the tensor is from hvlike.empty_shared."
    )
    if any(result.dtype in ("float16", "bfloat16") for result in results):
        foot += f"\n{MPI} adds no 16-bit floats: it reduces the same values in float32."
    return "\n".join(["\n\n".join([*parts, foot]), *conditions["left_out"]])


def panels(results: Sequence[Result]) -> list[Bars | Curves]:
    """Times over size and ratios as bars, for each dtype."""
    drawn: list[Bars | Curves] = []
    for dtype, found in by_dtype(results).items():
        sizes = [float(result.size) for result in found]
        labels = [format_size(result.size) for result in found]
        times = {name: [Summary.of(result.seconds[name]).median for result in found] for name in found[0].seconds}
        ratios = {name: [result.ratios[name].of_medians for result in found] for name in found[0].ratios}
        others = {name: each for name, each in ratios.items() if RATIOS[name][1] in (OURS, SHARED, BARE)}
        floors = {name: each for name, each in ratios.items() if name not in others}
        drawn += [
            Curves(f"{dtype}: time", "size", "seconds", sizes, times, labels),
            Bars(f"{dtype}: how many times faster", "ratio", labels, others, line=1.0, logarithmic=True),
            Bars(f"{dtype}: times the floor", "ratio", labels, floors, line=1.0, logarithmic=True),
        ]
    return drawn


def by_dtype(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results in groups, in their order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.dtype, []).append(result)
    return groups


def _times(result: Result, names: Sequence[str]) -> list[str]:
    summaries = [Summary.of(result.seconds[name]) for name in names]
    cells = [f"{format_seconds(each.median)} [{each.spread:.0%}]" for each in summaries]
    return [format_size(result.size), str(len(result.seconds[OURS])), *cells]


def _ratios(result: Result, names: Sequence[str]) -> list[str]:
    cells = []
    for name in names:
        ratio = result.ratios[name]
        cells.append(f"{ratio.of_medians:.2f} [{ratio.paired.first_quartile:.2f}, {ratio.paired.third_quartile:.2f}]")
    return [format_size(result.size), *cells]
