"""Judges what a program has left: equal to the oracle and on all ranks, or an error that the pages describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from support.fuzz.changes import Resume
from support.fuzz.documented import DOCUMENTED, is_cause
from support.fuzz.outcomes import Failure, Outcome, Value
from support.fuzz.programs import Program, Setting
from torch import Tensor

# The last one is four units in the last place of bfloat16: what the ranks' gradients cancel was rounded with them.
EXACT, SINGLE, HALF, LOOSE = 1e-9, 1e-4, 2**-5, 0.5
# A training that explodes makes differences of any size of those in the last place.
LARGEST = 1e9
# Where 16 bits change a training by so much, the same bits rounded another way may change it by this many times that.
AMPLIFIES = 16
HALF_PARTS = {"bfloat16", "grad dtype"}


def tolerance(program: Program, setting: Setting) -> float:
    """Return the relative error that the dtypes of a program explain.

    The oracle rounds to 16 bits where hvlike does, but for sums of a node; and a norm may be another by its last bit.
    """
    options = program.given
    if HALF_PARTS & set(program.parts) or {"fp16", "bf16"} & {options.get("compression"), options.get("hook")}:
        # Averages over the ranks that have inputs are made of those over all ranks, which are rounded. Sums of many are
        # rounded another way where their order makes a last bit of float32.
        rounds_twice = setting.ranks_per_node or any(each in str(program) for each in ("Clip", "by_active"))
        if not rounds_twice and setting.ranks <= 3:
            return SINGLE
        # L-BFGS divides by differences of gradients: what was rounded decides where it goes. Batch norm divides, too.
        return LOOSE if program.optimizer == "lbfgs" else 2 * HALF if "batch norm" in program.parts else HALF
    text = str(program)
    # The compiler computes with learning rates in float32.
    if "float32" not in text and "CompiledSteps" not in text:
        return EXACT
    # Batch norm divides by what may be next to nothing.
    return 10 * SINGLE if "batch norm" in text else SINGLE


def judge(
    program: Program,
    setting: Setting,
    found: Sequence[Outcome],
    expected: Sequence[Outcome],
    run_oracle: Callable[[Program], Sequence[Outcome]],
) -> str | None:
    """Return what is wrong, None if nothing is. run_oracle: simulates another program on as many ranks."""
    ends = [_judge_end(each, wanted.failure) for each, wanted in zip(found, expected, strict=True)]
    for rank, wrong in enumerate(ends):
        if wrong:
            return f"rank {rank}: {wrong}" + _others(found, rank)
    allowed, exact = tolerance(program, setting), without_compression(program)
    pairs = list(zip(found, expected, strict=True))
    wrongs = [_differences(each, wanted, allowed) for each, wanted in pairs]
    if any(wrongs) and exact != program:
        # A training that grows makes more of what was rounded with every step.
        uncompressed = run_oracle(exact)
        wrongs = [_differences(*pair, allowed, other) for pair, other in zip(pairs, uncompressed, strict=True)]
    for rank, wrong in enumerate(wrongs):
        if wrong:
            return f"rank {rank}: {wrong}"
    return _parted(
        found, expected, _together(program, len(found)), any_layout=bool(program.given.get("sparse_as_dense"))
    )


def without_compression(program: Program) -> Program:
    """Return the same program with nothing that is sent in 16 bits, where it says so."""
    plain = {"compression": "none", "hook": "allreduce"}
    options = [
        (name, plain.get(name, value) if value in ("fp16", "bf16") else value) for name, value in program.options
    ]
    return replace(program, options=tuple(options))


def _together(program: Program, ranks: int) -> list[int]:
    """The ranks that train with rank 0 from the first to the last action: others may differ by rounding."""
    sets = [each.ranks for each in program.actions if isinstance(each, Resume)]
    sets += [program.given["process_set"]] if "process_set" in program.given else []
    return [rank for rank in range(1, ranks) if all((rank in each) == (0 in each) for each in sets)]


def is_sound(expected: Sequence[Outcome]) -> bool:
    """Whether the oracle can say how a program ends: no rank waits for ever, nothing overflows."""
    failures = [each.failure for each in expected]
    if any(each is not None and each.kind in ("Absent", "Unsound") for each in failures):
        return False
    values = [value for each in expected for _, seen in each.seen for value in seen.values() if value is not None]
    floats = (value.tensor() for value in values if value.dtype.startswith(("torch.float", "torch.bfloat")))
    return all(bool((each.abs() < LARGEST).all()) for each in floats)


def _judge_end(found: Outcome, wanted: Failure | None) -> str | None:
    failure = found.failure
    if wanted is None:
        return None if failure is None else f"an error that no page promises: {failure}\n{failure.trace}"
    if failure is None:
        return f"no error, but the oracle has one: {wanted}"
    if failure.action != wanted.action:
        return f"{failure}, but the oracle says: {wanted}\n{failure.trace}"
    if wanted.kind != "DocumentedError":
        return None if wanted.kind in failure.bases else f"{failure}, but one process says: {wanted}\n{wanted.trace}"
    kind, pattern, page = DOCUMENTED[wanted.text]
    if not is_cause(wanted.text, failure.bases, failure.text):
        return f"{failure}, where {page} promises {kind} ({pattern})"
    return None


def _others(found: Sequence[Outcome], rank: int) -> str:
    lines = [f"rank {other}: {each.failure or 'no error'}" for other, each in enumerate(found) if other != rank]
    return "\n" + "\n".join(lines)


def _differences(found: Outcome, wanted: Outcome, allowed: float, uncompressed: Outcome | None = None) -> str | None:
    """uncompressed: what the oracle has without rounding; how far it lies from `wanted` is what a value may be off."""
    others = {} if uncompressed is None else dict(uncompressed.seen)
    for (label, mine), (there, theirs) in zip(found.seen, wanted.seen, strict=False):
        if label != there:
            return f"{label} where the oracle has {there}"
        for name in {**mine, **theirs}:
            other = others.get(label, {}).get(name)
            wrong = _difference(mine.get(name), theirs.get(name), allowed, other)
            if wrong:
                return f"after {label}: {name} {wrong}"
    if len(found.seen) != len(wanted.seen):
        return f"{len(found.seen)} steps where the oracle has {len(wanted.seen)}"
    return None


def _difference(mine: Value | None, theirs: Value | None, allowed: float, uncompressed: Value | None) -> str | None:
    if mine is None or theirs is None:
        return None if mine is theirs else f"is {_shown(mine)}, expected {_shown(theirs)}"
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"is {mine.dtype} {list(mine.shape)}, expected {theirs.dtype} {list(theirs.shape)}"
    second = theirs.tensor()
    if not second.numel():
        return None
    most = allowed * max(1e-3 if allowed == EXACT else 1e-2, float(second.abs().max()))
    if uncompressed is not None and uncompressed.shape == theirs.shape:
        most = max(most, AMPLIFIES * _distance(uncompressed.tensor(), second))
    return f"is {_shown(mine)}, expected {_shown(theirs)}" if _distance(mine.tensor(), second) > most else None


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().nan_to_num(torch.inf).max())


def _shown(value: Value | None) -> str:
    return "None" if value is None else " ".join(str(value.tensor().tolist()).split())[:160]


def _parted(
    found: Sequence[Outcome], expected: Sequence[Outcome], ranks: Sequence[int], *, any_layout: bool
) -> str | None:
    """These ranks are bitwise equal to rank 0 where they are so in the oracle.

    any_layout: a gradient may be sparse on some ranks only, the docstring of DistributedOptimizer.
    """
    for step in range(len(expected[0].seen)):
        if not all(len(each.seen) > step for each in expected):
            break
        label = expected[0].seen[step][0]
        for name, value in expected[0].seen[step][1].items():
            for rank in ranks:
                if expected[rank].seen[step][1].get(name) != value:
                    continue
                first, other = found[0].seen[step][1].get(name), found[rank].seen[step][1].get(name)
                if any_layout and first is not None and other is not None:
                    other = replace(other, layout=first.layout)
                if first != other:
                    return f"after {label}: {name} is {_shown(first)} on rank 0, {_shown(other)} on rank {rank}"
    return None
