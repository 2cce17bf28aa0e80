"""What backward says to wrong arguments, on the worker that passes them, before anything is sent."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike import autograd as hvlike_autograd


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda context, root: (None, [root]), TypeError, "incompatible function arguments"),
        (lambda context, root: ("a", [root]), TypeError, "incompatible function arguments"),
        (lambda context, root: (1.0, [root]), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, None), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, root), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, [root, None]), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, "roots"), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, [root], "yes"), TypeError, "incompatible function arguments"),
        (lambda context, root: (context, []), RuntimeError, "No tensors provided for gradient computation"),
        (lambda context, root: (context, [root.detach()]), RuntimeError, "requires_grad not set on"),
        (lambda context, root: (context, [root, torch.ones(3)]), RuntimeError, "requires_grad not set on root 1"),
        (
            lambda context, root: (context, [root.expand(2)]),
            RuntimeError,
            r"shape \[2\].* is not a scalar, all roots need to be scalar",
        ),
        (
            lambda context, root: (context, [torch.ones(1, requires_grad=True)]),
            RuntimeError,
            "does not have a valid gradient function",
        ),
        (lambda context, root: (context + 1, [root]), RuntimeError, "Could not find autograd context with id: "),
        (lambda context, root: (context + 1, []), RuntimeError, "Could not find autograd context with id: "),
        (lambda context, root: (context, [root], False, "quick"), ValueError, "mode must be one of .*'smart'"),
    ],
)
def test_wrong_arguments_are_named(
    rpc: ModuleType, autograd: ModuleType, make: Any, error: type[Exception], text: str
) -> None:
    root = torch.ones(1, requires_grad=True) * 2
    with autograd.context() as context:
        with pytest.raises(error, match=text):
            autograd.backward(*make(context, root))
        # Nothing has happened: the context and the graph are as before.
        assert autograd.get_gradients(context) == {}
        autograd.backward(context, [root])
        assert len(autograd.get_gradients(context)) == 1


def test_a_released_context_is_unknown(rpc: ModuleType, autograd: ModuleType) -> None:
    with autograd.context() as context:
        root = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        autograd.backward(context, [root])


def test_outside_of_a_session(hvd: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        hvlike_autograd.backward(0, [torch.ones(1, requires_grad=True) * 2])
