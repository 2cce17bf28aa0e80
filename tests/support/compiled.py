"""Programs under torch.compile: each compared with the same one that is not compiled, and no frame of hvlike traced."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import hvlike
from hvlike.untraced import is_untraced

HOUSE = str(Path(hvlike.__file__).parent)
# What the compiler may look into: a module's own forward is compiled with the module inside.
OPEN = {"forward", "_check_input_dim"}
CONSTANTS = {"rank", "size"}  # What asks for them is part of a graph

Step = Callable[[Tensor], Any]
SIZES = (8, 10, 12, 12)  # With a second size torch compiles for all sizes


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


@contextmanager
def nothing_of_hvlike_is_compiled() -> Iterator[list[CodeType]]:
    """Yields the code that was compiled."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    seen: list[CodeType] = []
    torch.compiler.reset()
    handle = register_bytecode_hook(lambda before, after: seen.append(before))
    try:
        yield seen
    finally:
        handle.remove()
        torch.compiler.reset()
    ours = [code for code in seen if code.co_filename.startswith(HOUSE)]
    assert {code.co_name for code in ours if "resume_in_forward" not in code.co_name} <= OPEN, ours


@contextmanager
def entered_by_marked_doors() -> Iterator[None]:
    """Of the calls, hooks and callbacks by which this thread comes into hvlike, each is marked as one to run."""
    unmarked: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOUSE) and code.co_name not in {"<module>", *OPEN}:
            outer: FrameType | None = frame
            while outer is not None and not is_untraced(outer.f_code) and outer.f_code.co_name not in CONSTANTS:
                outer = outer.f_back
            if outer is None:
                unmarked.add(f"{Path(code.co_filename).name}: {code.co_name}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert unmarked == set()


def compare(hvd: ModuleType, make: Callable[[], tuple[nn.Module, Step]], sizes: tuple[int, ...] = SIZES) -> None:
    """Train by the step that `make` returns, as it is and compiled: the same parameters, on every rank."""
    results = []
    batches = []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(10 * number + hvd.rank())
        batches.append(torch.randn(size, 8, generator=generator))
    for compiles in (False, True):
        model, step = make()
        if not compiles:
            with entered_by_marked_doors():
                for batch in batches:
                    step(batch)
        else:
            with nothing_of_hvlike_is_compiled():
                compiled = torch.compile(step, backend="eager")
                for batch in batches:
                    compiled(batch)
        results.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    assert torch.equal(hvd.broadcast(results[1], 0), results[1])
