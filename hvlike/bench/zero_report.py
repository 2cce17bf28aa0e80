"""What bench zero has found: for people, for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hvlike.bench.comparison import Ratio, Summary
from hvlike.bench.conditions import heading
from hvlike.bench.plot import Bars
from hvlike.bench.report import table
from hvlike.bench.sizes import format_seconds, format_size

ADAM, ZERO, VIEW, ALONE = "DDP + Adam", "DDP + ZeRO", "DDP + ZeRO, views", "ZeRO alone"
TORCH_ADAM, TORCH_ZERO = "torch DDP + Adam", "torch DDP + ZeRO"


@dataclass(frozen=True)
class Result:
    """Bytes on each rank, and seconds of a step, of its slowest rank, for each contestant."""

    elements: int
    tensors: int
    state: dict[str, list[int]]
    """Of the optimizer, by rank."""
    gradients: dict[str, list[int]]
    """What is left after a step, by rank."""
    seconds: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "elements": self.elements,
            "tensors": self.tensors,
            "state_bytes": self.state,
            "gradient_bytes": self.gradients,
            "seconds": {name: {**asdict(Summary.of(each)), "samples": each} for name, each in self.seconds.items()},
            "ratios": {f"{name}/{ADAM}": asdict(Ratio.of(self.seconds, name, ADAM)) for name in self.seconds},
        }


def as_text(conditions: dict[str, Any], result: Result) -> str:
    """A table with head and foot."""
    size = conditions["ranks"]
    rows = []
    for name, samples in result.seconds.items():
        state, step, ratio = result.state[name], Summary.of(samples), Ratio.of(result.seconds, name, ADAM).paired
        share = max(state) / (result.state[ADAM][0] / size)
        rows.append(
            [
                name,
                str(len(samples)),
                format_size(max(state)),
                "-" if "Adam" in name else f"{share:.3f}",
                format_size(max(result.gradients[name])),
                f"{format_seconds(step.median)} [{step.spread:.0%}]",
                f"{ratio.median:.3f} [{ratio.first_quartile:.3f}, {ratio.third_quartile:.3f}]",
            ]
        )
    head = (
        f"training step, float32, Adam, {result.elements / 1e6:.1f} M parameters in {result.tensors} tensors, "
        f"{heading(conditions)}"
    )
    foot = (
        "state: bytes of the optimizer's state on the rank that has most; of 1/N: divided by an N-th of what\n"
        "DDP + Adam keeps on each rank. gradients: what a step leaves on the rank that has most.\n"
        "step: median over repetitions of the slowest rank [interquartile range].\n"
        "/ DDP + Adam: ratios within a repetition, median [quartiles]."
    )
    header = ["contestant", "n", "state", "of 1/N", "gradients", "step", f"/ {ADAM}"]
    return "\n\n".join([head, table(header, rows), foot])


def panels(result: Result) -> list[Bars]:
    """The state on a rank, and a step's time."""
    state = {name: [max(each) / (1 << 20)] for name, each in result.state.items()}
    steps = {name: [1e3 * Summary.of(each).median] for name, each in result.seconds.items()}
    return [Bars("optimizer state on a rank", "MiB", ["Adam"], state), Bars("a step", "ms", ["Adam"], steps)]
