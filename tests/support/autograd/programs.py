"""Random programs of several workers as plain data: routines that compute, call each other, and return tensors.

A routine has values (tensors) and references (RRefs), each known by its place in a list; a step adds some at the end.
What is drawn is valid for autograd: a tensor is changed in place only when no backward needs what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

Places = tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """A tensor of a worker that no operation has made."""

    grad: bool
    """It requires grad."""
    table: bool
    """It can be looked up in; no hook sees its gradient, which may be sparse."""
    hooked: bool
    """A hook bends its gradient."""


@dataclass(frozen=True)
class Use:
    """Add a leaf of the worker on which the routine runs."""

    leaf: int


@dataclass(frozen=True)
class Apply:
    """Add the outputs of an operation."""

    operation: str
    inputs: Places


@dataclass(frozen=True)
class Lookup:
    """Add rows of a table."""

    table: int


@dataclass(frozen=True)
class ChangeInPlace:
    """Change a value, and with it all that share its memory."""

    change: str
    target: int
    inputs: Places


@dataclass(frozen=True)
class Hook:
    """Have a hook bend the gradient of a value."""

    target: int


@dataclass(frozen=True)
class Run:
    """Run a routine on its worker with values and references of this one."""

    routine: int
    values: Places
    references: Places


class Call(Run):
    """And wait; adds its values and references."""


class Start(Run):
    """Without waiting."""


@dataclass(frozen=True)
class Wait:
    """Wait for a routine that was started, the first, second, ... of this one; adds its values and references."""

    started: int


class Remote(Run):
    """Adds one reference to its values."""


@dataclass(frozen=True)
class Refer:
    """Add a reference to values of this worker."""

    values: Places


@dataclass(frozen=True)
class Fetch:
    """Add the values behind a reference."""

    reference: int


Step = Use | Apply | Lookup | ChangeInPlace | Hook | Call | Start | Wait | Remote | Refer | Fetch


@dataclass(frozen=True)
class Routine:
    """What one worker does when it is called; the first routine of a program is called by nobody."""

    worker: int
    steps: tuple[Step, ...]
    values: Places
    """What it returns."""
    references: Places


@dataclass(frozen=True)
class Pass:
    """One backward: from the sums of some values of the first routine, or from the sum that another worker holds."""

    roots: Places
    retain: bool
    distant: bool = False


@dataclass(frozen=True)
class Program:
    """Leaves by worker, routines, and the passes that follow the first of them."""

    leaves: tuple[tuple[Leaf, ...], ...]
    routines: tuple[Routine, ...]
    distant: tuple[int, int] | None
    """A worker and a value of the first routine, whose sum that worker computes at the end."""
    passes: tuple[Pass, ...]

    @property
    def home(self) -> int:
        """The worker of the first routine and of the passes."""
        return self.routines[0].worker

    def __str__(self) -> str:
        lines = [f"{number}: {routine}" for number, routine in enumerate(self.routines)]
        return "\n".join([f"leaves {self.leaves}", *lines, f"distant {self.distant}", f"passes {self.passes}"])
