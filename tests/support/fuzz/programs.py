"""A training program as a plain value: it prints so that a reader can run it again, compares and pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.fuzz.training import Training


KINDS = ("optimizer", "ddp", "zero", "zero alone")
# Compiling takes seconds: by name only, a few programs a block.
COMPILED = ("compiled optimizer", "compiled ddp", "compiled zero")
# Two trainings at once.
SEVERAL = ("in turn", "in threads")
# Kinds that run twice: torch's own wrappers over hvlike's backend and over gloo; hvlike's DDP, and torch's over gloo.
TORCH = ("torch ddp", "fsdp2", "ddp beside gloo")


@dataclass(frozen=True)
class Action:
    """One thing that a program does on every rank."""

    def do(self, training: Training) -> None:
        """Do it on this rank."""
        raise NotImplementedError

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        told = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != defaults[name])
        return f"{type(self).__name__}({told})"


@dataclass(frozen=True)
class Program:
    """A model, what wraps it, and what is done with it."""

    kind: str
    parts: tuple[str, ...] = ()
    optimizer: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    actions: tuple[Action, ...] = ()
    second: Program | None = None  # Runs beside this one
    threads: bool = False  # Each of the two in a thread of its own; else their actions take turns

    @property
    def runs_twice(self) -> bool:
        """Whether each rank has two outcomes."""
        return self.second is not None or self.kind in TORCH

    @property
    def given(self) -> Mapping[str, Any]:
        """The options of the wrapper by name."""
        return dict(self.options)

    def __str__(self) -> str:
        lines = [
            f"kind={self.kind!r},",
            f"parts={self.parts!r},",
            f"optimizer={self.optimizer!r},",
            f"options={self.options!r},",
            "actions=(",
            *(f"    {action}," for action in self.actions),
            "),",
        ]
        if self.second is not None:
            lines += [*f"second={self.second},".splitlines(), f"threads={self.threads},"]
        return "Program(\n" + "".join(f"    {line}\n" for line in lines) + ")"


@dataclass(frozen=True)
class Setting:
    """Where a program runs."""

    ranks: int
    overlap: bool = False
    ranks_per_node: int | None = None

    @property
    def knobs(self) -> dict[str, str]:
        """The environment that hvlike reads."""
        knobs = {"HVLIKE_OVERLAP": str(int(self.overlap))}
        return knobs if self.ranks_per_node is None else knobs | {"HVLIKE_RANKS_PER_NODE": str(self.ranks_per_node)}
