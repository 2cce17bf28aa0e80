"""The short forms of a group's methods: one tensor for a list of one, an operation, a root or a timeout for options.

torch's own class has them as overloads, and libraries call them; torch.distributed itself passes lists and options.
Source: torch/csrc/distributed/c10d/init.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}  # Argument of a short form: what options call it


def short_form(options: Any, tensors: int, *fields: str, lists: bool = True) -> Callable[[Method], Method]:
    """Let a method that takes tensors and options also be called in its short form.

    Args:
        options: The class of its options.
        tensors: How many arguments come before the options.
        fields: What the short form has instead of options, in this order: "root", "op", "timeout".
        lists: Whether the method takes each of its tensors in a list, with which the short form does away.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if not named and len(arguments) == tensors + 1 and hasattr(arguments[tensors], "timeout"):
                return method(self, *arguments)  # torch.distributed, and C++
            given, rest = arguments[:tensors], arguments[tensors:]
            if lists and any(isinstance(each, Tensor) for each in given):
                given = tuple([each] for each in given)
            return method(self, *given, _options(options, fields, rest, named))

        return cast(Method, call)

    return decorate


def _options(options: Any, fields: Sequence[str], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """The options that a caller gives, or those that say what it gives instead."""
    given = named.get("opts") or (arguments[0] if arguments and hasattr(arguments[0], "timeout") else None)
    if given is not None:
        return given
    made = options()
    for name, value in [*zip(fields, arguments, strict=False), *named.items()]:
        if value is not None:
            setattr(made, _FIELDS.get(name, name), value)
    return made
