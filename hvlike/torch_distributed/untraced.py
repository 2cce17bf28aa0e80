"""Methods that torch.compile leaves alone: C++ calls them inside of compiled programs, of which they are no part."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type)


def untraced(kind: T) -> T:
    """Have torch.compile run the methods of a class, and all that they call, as they are. A class decorator.

    torch.compiler.disable would do it by a function around each, which loads the compiler, too.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):  # From torch 2.7 on
        skip = dynamo._FrameAction.SKIP
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                dynamo.set_code_exec_strategy(method.__code__, dynamo._FrameExecStrategy(skip, skip))
    return kind
