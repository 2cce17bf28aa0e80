"""Draws programs that a user may write: each kind of wrapper with the models, options and actions that it promises."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar

from hypothesis import strategies as st
from support.fuzz.changes import Add, Convert, Copy, Freeze, FreezeAll, Hook, Reload, Replace, Resize, Resume, Rewrap
from support.fuzz.models import OTHER_DTYPES, PARTS, WITHOUT_PARAMETERS
from support.fuzz.passes import EVERYWHERE, Evaluate, Pass
from support.fuzz.programs import KINDS, SEVERAL, TORCH, Action, Program
from support.fuzz.steps import (
    Clip,
    ClosureStep,
    CompiledSteps,
    DropGradient,
    DropPass,
    Scaler,
    Schedule,
    Step,
    Synchronize,
    ZeroGrad,
)
from support.fuzz.uneven import Uneven

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]
MOST_PARTS, MOST_STEPS = 3, 4
PLAIN_FORMS = ("plain", "two forwards", "create graph", "penalty")
WITHOUT_GRADIENTS = ("grad", "func", "forward", "raise in forward")
OTHER_FORMS = ("two backwards", "by hand", "raise in backward")


class Draft:
    """A program while it is drawn."""

    def __init__(
        self,
        draw: Draw,
        kind: str,
        ranks: int,
        without: Collection[str],
        *,
        threads: bool = False,
        beside: str | None = None,
    ) -> None:
        """beside: the kind of a program whose actions come between those of this one."""
        self.draw, self.kind, self.ranks, self.without = draw, kind.removeprefix("compiled "), ranks, without
        self.threads, self.beside = threads, beside
        self.compiles = kind.startswith("compiled")
        self.actions: list[Action] = []
        self.batches = 0
        self.is_torch = kind in TORCH
        self.wraps_module = self.is_torch or kind.removeprefix("compiled ") in ("ddp", "zero")
        self.options = self.draw_options()
        self.parts = tuple(draw(st.lists(st.sampled_from(self.allowed_parts()), max_size=MOST_PARTS)))
        unscaled = self.options.get("op") == "adasum" or self.kind == "zero alone" or "in_backward" in self.options
        self.scales = self.chance(10) and not unscaled
        self.steady = self.scales or bool(self.options.get("static_graph")) or "in_backward" in self.options
        self.ranks_together = self.options.get("process_set", tuple(range(ranks)))
        self.resized = self.has_frozen = False
        # Since the last step: something was thawed; some ranks alone used it then, so nothing may be frozen again.
        self.thawed = self.stays_thawed = False
        self.optimizer = self.draw_optimizer()

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred programs; shrinks to False."""
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def choose(self, *values: T) -> T:
        """One of the values; shrinks to the first."""
        return self.draw(st.sampled_from(values))

    def draw_options(self) -> dict[str, Any]:
        """Options of the wrapper that differ from their defaults."""
        options: dict[str, Any] = {}
        if self.kind == "optimizer":
            options["op"] = self.choose("average", "average", "sum", "adasum")
            options["backward_passes_per_step"] = self.choose(1, 1, 2, 3)
            options["named"] = self.threads or self.choose(False, True)
            if options["op"] == "average":
                options["gradient_predivide_factor"] = self.choose(1.0, 2.0, 0.25)
            if options["op"] != "adasum":
                options["compression"] = self.choose("none", "none", "none", "fp16", "bf16")
                options["sparse_as_dense"] = self.choose(False, True)
            options["groups"] = self.choose(None, None, 1, 2, "lists")
            if self.ranks > 1 and self.chance(10):
                options["process_set"] = self.draw_set()
        elif self.wraps_module:
            options[self.choose("find_unused_parameters", "static_graph", "plain")] = True
            options.pop("plain", None)
            options["broadcast_buffers"] = self.choose(True, False)
            options["bucket_cap_mb"] = self.choose(None, 0.0001)
            options["gradient_as_bucket_view"] = self.choose(False, True)
            if self.chance(15):
                options["hook"] = self.choose("allreduce", "fp16", "bf16", "own")
            if self.kind == "zero" and self.chance(10):
                options["in_backward"] = self.choose("at the end", "interleaved")
            if self.kind == "ddp" and self.ranks > 1 and "hook" not in options and self.chance(10):
                options["process_set"] = self.draw_set()
        if self.is_torch:
            options.pop("hook", None)
            options.pop("process_set", None)
            return {} if self.kind == "fsdp2" else {each: value for each, value in options.items() if value is not None}
        if self.chance(20) and not self.threads:
            options["start"] = "own" if self.wraps_module else "broadcast"
        if self.kind == "ddp" and self.chance(8):
            # Ranks that start alike, or stay different.
            options["init_sync"] = False
        defaults = {
            "op": "average",
            "backward_passes_per_step": 1,
            "named": False,
            "gradient_predivide_factor": 1.0,
            "compression": "none",
            "sparse_as_dense": False,
            "groups": None,
            "broadcast_buffers": True,
            "bucket_cap_mb": None,
            "gradient_as_bucket_view": False,
        }
        return {name: value for name, value in options.items() if value != defaults.get(name)}

    def draw_set(self) -> tuple[int, ...]:
        """Some of the ranks."""
        return self.choose((0,), (0, self.ranks - 1), tuple(range(self.ranks - 1)))

    def allowed_parts(self) -> list[str]:
        """Parts that the pages do not refuse with this wrapper."""
        refused = set(self.without)
        if self.kind in ("zero", "zero alone"):
            refused |= OTHER_DTYPES | {"sparse embedding", "lazy", "empty"}
        if self.is_torch:
            refused |= {"complex", "sparse embedding", "sparse buffer", "sync batch norm", "grad dtype"}
        if self.kind == "fsdp2":
            # One dtype, no parameter without dimensions; ranks' own buffers do not matter.
            refused |= OTHER_DTYPES | {"scalar", "empty", "frozen", "tied", "weight norm"}
        if self.wraps_module:
            refused |= {"lazy"}
        if self.threads:
            # Its statistics have no name of their own.
            refused |= {"sync batch norm"}
        if self.options.get("start"):
            refused |= {"lazy", "sparse buffer"}
        if self.wraps_module and self.options.get("broadcast_buffers", True):
            refused |= {"sparse buffer"}
        if self.options.get("op") == "adasum":
            refused |= {"complex", "sparse embedding"}
        if "compression" in self.options or "hook" in self.options:
            refused |= {"complex", "sparse embedding"}
        if "process_set" in self.options or "init_sync" in self.options:
            # It takes the weights of all ranks for equal, as torch's does.
            refused |= {"sync batch norm"}
        return [name for name in PARTS if name not in refused]

    def draw_optimizer(self) -> str:
        if "sparse embedding" in self.parts:
            return "sgd"
        plain = self.kind in ("optimizer", "ddp") and self.options.get("op") != "adasum"
        plain = plain and not (self.steady or self.threads or self.compiles)
        if plain and self.options.get("backward_passes_per_step", 1) == 1 and self.chance(5):
            return "lbfgs"
        return self.choose("sgd", "momentum", "decay", "adam", "adamw")

    def layers(self) -> list[int]:
        """Numbers of layers with parameters."""
        return [-1, -2, *(number for number, name in enumerate(self.parts) if name not in WITHOUT_PARAMETERS)]

    def batch(self) -> int:
        self.batches += 1
        return self.batches

    def forms(self) -> list[str]:
        """Forms of passes that torch can do with these parts in one process."""
        refused = set(self.without)
        if "reentrant checkpoint" in self.parts:
            # Its gradients arrive once for each forward; docs/recipes.md and docs/ddp.md
            refused |= {"two forwards"}
        if "sync batch norm" in self.parts:
            refused |= {"penalty", "create graph"}
        if {"reentrant checkpoint", "sparse embedding", "lazy"} & set(self.parts):
            refused |= {"penalty", "grad", "func", "by hand", "create graph"}
        if {"checkpoint", "reentrant checkpoint"} & set(self.parts):
            refused |= {"two backwards"}
        if self.threads:
            # An exchange by hand has no name of its own.
            refused |= {"by hand"}
        if self.beside and self.wraps_module:
            # While a pass of one module is half done, nobody may join with the other one.
            refused |= {"raise in backward"}
        if any(isinstance(each, Hook) and each.after for each in self.actions):
            # torch.func has no gradient that it could give to such a hook.
            refused |= {"func"}
        if {"checkpoint", "batch norm", "sync batch norm", "weight norm", "complex", "grad dtype"} & set(self.parts):
            refused |= {"func"}
        if "batch norm" in self.parts and self.wraps_module and self.options.get("broadcast_buffers", True):
            refused |= {"two forwards"}
        if self.is_torch:
            refused |= {*WITHOUT_GRADIENTS, *OTHER_FORMS, "penalty"}
        if self.steady:
            refused |= {*PLAIN_FORMS[1:], *WITHOUT_GRADIENTS, *OTHER_FORMS}
        return [form for form in (*PLAIN_FORMS, *WITHOUT_GRADIENTS, *OTHER_FORMS) if form not in refused]

    def make_pass(self, *forms: str, local: bool = False, alone: bool = False) -> Pass:
        """Draw a pass in one of these forms, as far as they are possible; alone: one rank may raise."""
        possible = [form for form in forms if form in self.forms()] or ["plain"]
        unused: list[tuple[int, int]] = []
        partial = not self.wraps_module or bool(self.options.get("find_unused_parameters"))
        partial = partial and "sync batch norm" not in self.parts
        if self.parts and not self.steady and self.chance(30 if partial else 5):
            # A lazy layer gets its shape in the first pass; buffers that grow do so on all ranks.
            part = self.choose(*range(len(self.parts)))
            alike = {"lazy", "counting"} if self.wraps_module else {"lazy"}
            partial = partial and self.parts[part] not in alike
            # Torch's DDP leaves such gradients as they are on each rank.
            parts_ranks = self.kind == "ddp beside gloo" and not self.options.get("find_unused_parameters")
            everywhere = not ("unused everywhere" in self.without or self.parts[part] == "lazy" or parts_ranks)
            where = (EVERYWHERE,) if everywhere else ()
            where += tuple(range(self.ranks)) if partial else ()
            if where:
                unused.append((part, self.choose(*where)))
        some = any(rank != EVERYWHERE for _, rank in unused)
        self.stays_thawed |= some and self.thawed
        inside: tuple[tuple[int, bool], ...] = ()
        if not (self.steady or self.is_torch or "freeze" in self.without) and self.chance(5):
            inside = ((self.choose(*self.layers()), self.freezes(self.choose(True, False))),)
        form = self.choose(*possible)
        absent = None
        whole = self.wraps_module or self.steady or {"sync batch norm", "lazy"} & set(self.parts) or self.ranks == 1
        if not whole and form != "by hand" and self.chance(8):
            absent = self.choose(*range(self.ranks))
        self.stays_thawed |= (some or absent is not None) and self.thawed
        between: tuple[tuple[int, bool], ...] = ()
        steady = self.steady or self.is_torch or {"sync batch norm", "lazy"} & set(self.parts)
        # It makes its graph in backward, with what has been thawed since.
        steady = steady or (self.wraps_module and "reentrant checkpoint" in self.parts)
        if form == "plain" and not steady and absent is None and "freeze" not in self.without and self.chance(5):
            between = ((self.choose(*self.layers()), self.freezes(self.choose(True, False))),)
        raises_alone = alone and form.startswith("raise") and not whole and not unused and absent is None
        return Pass(
            self.batch(),
            form,
            unused=tuple(unused),
            local=local,
            scaled=self.scales,
            spoilt=self.choose(*range(self.ranks)) if self.scales and not local and self.chance(25) else None,
            # What forward sets is set on all ranks.
            inside=inside if absent is None else (),
            absent=absent,
            between=between,
            raiser=self.choose(EVERYWHERE, *range(self.ranks)) if raises_alone else EVERYWHERE,
            caught=self.wraps_module and not self.is_torch and self.chance(15),
        )

    def freezes(self, wanted: bool) -> bool:
        """Whether to freeze, or to thaw. Never what some ranks alone have used since it was thawed; docs/recipes.md."""
        frozen = wanted and not (self.stays_thawed or self.resized)
        self.has_frozen |= frozen
        self.thawed = self.thawed or not frozen
        return frozen

    def change(self) -> None:
        """Maybe something that a program does while gradients accumulate, or between steps."""
        if self.steady or not self.chance(35):
            return
        if self.is_torch:
            self.evaluate()
            return
        changes = ("thaw", "freeze", "thaw all", "freeze all", "evaluate", "look", "drop", "hook", "raise")
        kinds = {each: each.removesuffix(" all").replace("thaw", "freeze") for each in changes}
        what = self.choose(*(each for each, kind in kinds.items() if kind not in self.without))
        if what in ("thaw", "freeze"):
            self.actions.append(Freeze(self.choose(*self.layers()), self.freezes(what == "freeze")))
        elif what in ("thaw all", "freeze all"):
            self.actions.append(FreezeAll(self.freezes(what == "freeze all")))
        elif what == "evaluate":
            self.evaluate()
        elif what == "look":
            form = self.make_pass(*WITHOUT_GRADIENTS)
            if form.form in WITHOUT_GRADIENTS:
                self.actions.append(form)
        elif what == "raise":
            self.interrupted()
        elif what == "drop":
            self.actions.append(DropGradient(self.choose(*self.layers())))
        else:
            self.actions.append(Hook(self.choose(*self.layers()), self.choose(False, True)))

    def interrupted(self) -> None:
        """A pass in whose backward something raises; the program catches it, and most drop its gradients."""
        if "raise in backward" not in self.forms():
            return
        begun = self.kind == "optimizer" and self.options.get("op") != "adasum" and self.chance(70)
        local = not begun and (not self.wraps_module or self.chance(70))
        self.actions.append(self.make_pass("raise in backward", local=local, alone=local or begun))
        if begun:
            self.actions.append(DropPass())
        elif local and self.chance(70):
            self.actions.append(ZeroGrad())

    def evaluate(self) -> None:
        if self.kind == "ddp beside gloo" and {"batch norm", "counting"} & set(self.parts):
            # Torch's DDP sends buffers then, too; docs/ddp.md
            return
        alone = () if self.is_torch or {"counting", "sync batch norm"} & set(self.parts) else range(self.ranks)
        self.actions.append(Evaluate(self.batch(), self.choose(EVERYWHERE, *alone), self.choose(False, True)))

    def between_steps(self) -> None:
        """Maybe something that only happens between steps."""
        self.change()
        if self.steady or self.threads or self.resized or not self.chance(20):
            return
        possible: list[Action] = [Schedule(), Reload(), Copy()]
        if "weight norm" not in self.parts:
            possible.append(Copy(pickled=True))
        if self.kind in ("zero", "zero alone", *TORCH):
            possible = [Schedule()]
        if self.kind == "optimizer" and self.options.get("groups") is None and self.optimizer != "lbfgs":
            possible += [Add(), Replace()]
        if self.kind in ("optimizer", "ddp"):
            possible += [Rewrap(), Rewrap(), Rewrap(keep=False)]
        if not (OTHER_DTYPES | {"sparse buffer", "lazy"}) & set(self.parts) and self.kind in ("optimizer", "ddp"):
            possible.append(Convert("float32"))
        possible += [*self.other_ranks(), *self.more_rows()]
        chosen = self.choose(*possible)
        if isinstance(chosen, Rewrap | Resume):
            # A wrapper takes over what trains when it is made.
            self.actions.append(FreezeAll(False))
        if isinstance(chosen, Resume):
            self.ranks_together = chosen.ranks
        self.resized = isinstance(chosen, Resize)
        self.actions.append(chosen)

    def other_ranks(self) -> list[Action]:
        """Ways to go on among other ranks."""
        refused = {"sync batch norm", "sparse buffer", "lazy", "counting"} & set(self.parts)
        if self.is_torch or refused or "hook" in self.options or self.optimizer == "lbfgs" or self.ranks == 1:
            return []
        every = range(self.ranks)
        sets = [each for count in range(self.ranks, 0, -1) for each in combinations(every, count)]
        # One of them: each action is as likely as any other.
        return [Resume(self.choose(*(each for each in sets if each != self.ranks_together)))]

    def more_rows(self) -> list[Action]:
        """Ways to give a parameter another shape, which optimizers without a state of their own bear."""
        if self.is_torch or self.options.get("op") == "adasum" or self.optimizer not in ("sgd", "decay"):
            return []
        if self.kind == "zero alone" or self.has_frozen:
            # Plain torch refuses it where something has kept the graph; ZeRO has not, nor a wrapper that saw it frozen.
            return []
        return [Resize(number) for number, name in enumerate(self.parts) if name == "embedding"][:1]

    def step(self) -> None:
        """One step: gradients dropped, local passes, the passes that are reduced, what follows them, the step."""
        self.thawed = self.stays_thawed = False
        self.between_steps()
        whole = self.scales or self.threads or self.options.get("op") == "adasum"
        if self.optimizer == "lbfgs" or (self.kind == "optimizer" and not whole and self.chance(8)):
            self.actions.append(ClosureStep(self.make_pass("plain")))
            return
        if self.options.get("op") == "sum" or self.kind == "zero alone" or not self.chance(8):
            self.actions.append(ZeroGrad(self.choose(True, False), self.kind != "optimizer" and self.chance(30)))
            self.change()
        if not self.steady:
            for _ in range(self.choose(0, 0, 1, 2)):
                self.actions.append(self.make_pass("plain", "two backwards", *PLAIN_FORMS, local=True))
                self.change()
        if not self.steady and self.chance(8) and self.may_join():
            self.actions.append(self.uneven())
            return
        self.reduced_passes()
        # Torch has no norm of sparse gradients, which may be there on some ranks only.
        mixed = "sparse embedding" in self.parts and "sparse_as_dense" in self.options
        if self.chance(15) and not mixed:
            self.actions.append(Clip(scaled=self.scales))
        elif self.kind == "optimizer" and not self.scales and self.options.get("op") != "adasum" and self.chance(10):
            self.actions.append(Synchronize(self.choose(1.0, 0.5)))
            return
        self.actions.append(Step(self.scales))

    def may_join(self) -> bool:
        """Whether the pages let ranks have different numbers of inputs here."""
        refused = {"sparse embedding", "sync batch norm", "lazy"} | ({"counting"} if self.wraps_module else set())
        whole = self.is_torch or self.threads or "join" in self.without or len(self.ranks_together) < self.ranks
        # Whoever joins may have no backward without its step.
        return not whole and self.beside != "optimizer" and not refused & set(self.parts)

    def uneven(self, *, compiled: bool = False) -> Uneven:
        """Steps on ranks that have different numbers of inputs."""
        counts = tuple(self.choose(0, 1, 2) for _ in range(self.ranks - 1))
        of_deltas, own = self.options.get("op") == "adasum", self.options.get("hook") == "own"
        by_active = not of_deltas and not own and self.choose(False, True)
        return Uneven((2, *counts), self.batch(), by_active, compiled)

    def reduced_passes(self) -> None:
        most = self.options.get("backward_passes_per_step", 1)
        if self.kind in ("ddp", "zero") and not self.options.get("static_graph"):
            most = 2
        if self.kind == "zero alone":
            most = 3
        if self.chance(6) and "by hand" in self.forms() and not self.resized:
            self.actions.append(self.make_pass("by hand"))
            return
        for number in range(self.choose(*range(most, 0, -1))):
            if number:
                self.change()
            self.actions.append(self.make_pass(*PLAIN_FORMS))
        if not self.wraps_module and self.chance(6):
            last = self.make_pass("raise in forward", "raise in backward", alone=True)
            self.actions[-1] = last if last.raiser != EVERYWHERE else self.actions[-1]

    def program(self) -> Program:
        """Draw the actions."""
        if self.compiles:
            self.parts = tuple(each for each in self.parts if each in PARTS_TO_COMPILE)
            for _ in range(self.choose(1, 2)):
                self.actions.append(CompiledSteps((self.batch(), self.batch(), self.batch()), self.choose(True, False)))
                self.actions.append(Freeze(self.choose(*self.layers()), self.choose(True, False)))
                if self.chance(30) and self.may_join():
                    self.actions.append(self.uneven(compiled=True))
            return self.drawn()
        if self.scales:
            self.actions.append(Scaler())
        for _ in range(self.choose(*range(1, MOST_STEPS + 1))):
            self.step()
        return self.drawn()

    def drawn(self) -> Program:
        """Return what has been drawn."""
        return Program(self.kind, self.parts, self.optimizer, tuple(self.options.items()), tuple(self.actions))


@st.composite
def programs(draw: Draw, kind: str, ranks: int, without: Collection[str] = ()) -> Program:
    """Programs of a kind for a number of ranks."""
    if kind in SEVERAL:
        threads = kind == "in threads"
        kinds = ["optimizer" if threads else draw(st.sampled_from(KINDS)) for _ in range(2)]
        first, second = (
            Draft(draw, kind, ranks, without, threads=threads, beside=other).program()
            for kind, other in (kinds, kinds[::-1])
        )
        return replace(first, second=second, threads=threads)
    return Draft(draw, kind, ranks, without).program()


PARTS_TO_COMPILE = ("linear", "shared", "tied", "scalar", "frozen", "batch norm", "channels last")
