"""Faults that are planted into a copy of hvlike: random programs that do not find them are no test.

The first ones take back what once was repaired.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Plant:
    """Texts of files below hvlike/, and what stands in their places."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    kinds: tuple[str, ...] = ()  # Of programs that can find it; default: all that are run by default

    def missing(self) -> list[str]:
        """Return the files in which a text does not stand exactly once."""
        return [file for file, old, _ in self.changes if (ROOT / "hvlike" / file).read_text().count(old) != 1]


def plant(name: str, *changes: tuple[str, str, str], kinds: tuple[str, ...] = ()) -> Plant:
    """One fault."""
    return Plant(name, changes, kinds)


MODULE = "training/ddp/module_gradients.py"
GRADIENTS = "training/gradients/gradients.py"
CONTRIBUTIONS = "training/gradients/contributions.py"
STATE = "training/gradients/grad_state.py"
REDUCED = "training/gradients/reduced_parameters.py"
REDUCTION = "training/gradients/reduction.py"

PLANTS = [
    plant(
        "DDP looks for thawed layers only when backward has begun",
        (MODULE, "if (running is not None and running.reduces) or is_inside_backward():\n", "if True:\n"),
    ),
    plant(
        "no gradient on any rank is a gradient of zeros",
        (CONTRIBUTIONS, "if slot.index in absent or (slot.wire", "if (slot.wire"),
    ),
    plant(
        "sums of a layer that was frozen meanwhile are not reduced",
        (
            GRADIENTS,
            "return parameter.requires_grad or parameter.grad is not None or self.reducers.keeps(slot)",
            "return parameter.requires_grad",
        ),
        (
            MODULE,
            "return parameter.requires_grad or holds_sums or self.reducers.keeps(slot)",
            "return parameter.requires_grad",
        ),
    ),
    plant(
        "passes that accumulate nothing reduce",
        (MODULE, "any(node is not None and will_reach(node) for node in nodes) or (", "True or ("),
    ),
    plant(
        "gradients travel in the dtype of their parameter",
        (
            STATE,
            "parameter, dtype = self.parameter, gradient_dtype(self.parameter)",
            "parameter, dtype = self.parameter, self.parameter.dtype",
        ),
        (
            REDUCTION,
            "return parameter.dtype if self.of_deltas else gradient_dtype(parameter)",
            "return parameter.dtype",
        ),
    ),
    plant(
        "two owners of a parameter both reduce it",
        (REDUCED, "        self.hooks.take(parameters)\n", ""),
    ),
    plant(
        "torch.compile traces what backward calls of hvlike",
        (
            "untraced.py",
            "        function._torchdynamo_disable = True  # type: ignore[attr-defined]\n",
            "        continue\n",
        ),
        kinds=("compiled ddp", "compiled optimizer"),
    ),
    plant(
        "predivided gradients are not multiplied again",
        (REDUCTION, "self.op, size, 1.0 / factor, factor,", "self.op, size, 1.0 / factor, 1.0,"),
    ),
    plant(
        "averages of float32 divide by one rank too many",
        (
            "collectives/requests/reduction.py",
            "divisor = size if op is Average else 1",
            "divisor = size + (dtype is torch.float32) if op is Average else 1",
        ),
    ),
    plant(
        "a step does not wait for its last bucket",
        (
            "training/gradients/planned_reducer.py",
            "self._wait_in_step(step, self._site, schedule.described)",
            "self._running = []",
        ),
    ),
    plant(
        "a plan stays when the module was converted",
        (STATE, "and self.dtype is gradient_dtype(parameter)", "and True"),
        (
            "training/gradients/own_proposal.py",
            "        if dtypes == [entry.dtype for entry in self.entries]:\n",
            "        if True:\n",
        ),
    ),
    plant(
        "local sums of what the last pass has not used count as zeros",
        (
            CONTRIBUTIONS,
            "gradient = slot.parameter.grad if slot.handed_over is None else slot.handed_over\n",
            "gradient = slot.handed_over\n",
        ),
    ),
    plant(
        "buffers are not sent",
        (
            "training/ddp/data_parallel.py",
            "if not (self.forward_sync_buffers and self._has_buffers):\n",
            "if True:\n",
        ),
    ),
    plant(
        "Adasum adds its result to what the step has made",
        (
            "training/gradients/adasum_deltas.py",
            "        torch._foreach_add_(deltas, self._starts)\n",
            "        torch._foreach_add_(deltas, self._values())\n",
        ),
    ),
]


@contextmanager
def planted(fault: Plant) -> Iterator[Path]:
    """Make a folder with a copy of hvlike that has this fault."""
    with TemporaryDirectory(prefix="hvlike-planted-") as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "hvlike", copy / "hvlike", ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in fault.changes:
            path = copy / "hvlike" / file
            text = path.read_text()
            if old not in text:
                raise ValueError(f"{fault.name}: {file} has no {old!r}")
            path.write_text(text.replace(old, new))
        yield copy
