"""The parameters of an optimizer: names, groups that are reduced together, options, and whether they have changed.

Pure functions but for `gpu_of`, which looks at the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, TypeAlias
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hvlike.backends.cuda.runtime import kind_of
from hvlike.collectives.requests.plan import Options
from hvlike.errors import UsageError, WrongTypeError
from hvlike.observe.looking import only_looks
from hvlike.training.gradients.checksums import is_plain, value_checksums
from hvlike.training.gradients.planned_reducer import PlannedReducer
from hvlike.training.gradients.usage_errors import warn_user

_EXPECTED_NAMES = (
    "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
)


def find_duplicates(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def check_named_parameters(named_parameters: object) -> dict[Tensor, str]:
    """Return the user's names by parameter. A parameter with two names keeps the first."""
    if not isinstance(named_parameters, Iterable) or isinstance(named_parameters, (Mapping, Tensor, str)):
        raise WrongTypeError(f"{_EXPECTED_NAMES} Got {type(named_parameters).__name__}.")
    pairs: list[Any] = list(named_parameters)
    for pair in pairs:
        named = isinstance(pair, tuple) and len(pair) == 2
        if not (named and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise WrongTypeError(f"{_EXPECTED_NAMES} Got an item of type {type(pair).__name__}.")
    names: dict[Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    # Naming one parameter twice is an error, too.
    repeated = find_duplicates(name for name, _ in pairs)
    if repeated:
        raise UsageError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}")
    return names


def check_all_named(names: Mapping[Tensor, str], parameters: Iterable[Tensor]) -> None:
    unnamed = [parameter for parameter in parameters if parameter not in names]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(str(id(parameter)) for parameter in unnamed)} "
            f"(shapes {', '.join(str(list(parameter.shape)) for parameter in unnamed)}). "
            "Pass the names of all parameters of the optimizer, or none."
        )


def name_parameters(param_groups: Sequence[Mapping[str, Any]], given: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return a name for each parameter of the groups: the given one, torch's, or `noname.<group>.<index>`."""
    names: dict[Tensor, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            automatic = f"noname.{number}.{index}"
            proposals = [given.get(parameter), *group.get("param_names", [])[index : index + 1], automatic]
            free = (each for each in proposals if each and each not in taken)
            names[parameter] = next(free, f"{automatic} of {number}.{index}")
            taken.add(names[parameter])
    return names


Groups: TypeAlias = int | list[list[Tensor]] | None

_EXPECTED_GROUPS = "groups should be a non-negative integer or a list of list of torch.Tensor."


def check_groups(groups: object, num_groups: int = 0) -> Groups:
    """Return the number of groups, the lists of parameters, or None for the library's own choice (also for 0)."""
    if num_groups != 0:
        warn_user(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.", DeprecationWarning
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise UsageError(f"{_EXPECTED_GROUPS} Got {groups}.")
        return groups or None
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise WrongTypeError(f"{_EXPECTED_GROUPS} Got {type(groups).__name__}.")
    seen: set[Tensor] = set()
    for number, group in enumerate(groups):
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise UsageError(
                    "groups must consist of torch.Tensor. "
                    f"Group {number} has an item of type {type(parameter).__name__}."
                )
            if parameter in seen:
                raise UsageError(
                    "A parameter can only appear once in groups. "
                    f"The one of shape {list(parameter.shape)} in group {number} was there before."
                )
            seen.add(parameter)
    return [list(group) for group in groups]


def group_indices(groups: Groups, parameters: Sequence[Tensor]) -> int | list[list[int]] | None:
    """Return `groups` as indices in `parameters`, without parameters that are not there (frozen ones)."""
    if not isinstance(groups, list):
        return groups
    places = {parameter: place for place, parameter in enumerate(parameters)}
    found = [[places[parameter] for parameter in group if parameter in places] for group in groups]
    return [group for group in found if group]


GroupOptions = list[dict[str, Any]]
_OF_PARAMETERS = ("params", "param_names")


def options_of(groups: Sequence[Mapping[str, Any]]) -> GroupOptions:
    return [{key: value for key, value in group.items() if key not in _OF_PARAMETERS} for group in groups]


_PLAIN: tuple[Any, ...] = (bool, int, float, str, type(None))


@only_looks(())
def describe_options(groups: Sequence[Mapping[str, Any]]) -> Options:
    """Return what has to be equal on all ranks, as text: numbers, switches and names in host memory."""
    return tuple(
        (f"{key} of parameter group {number}", text)
        for number, group in enumerate(options_of(groups))
        for key, value in group.items()
        for text in [_text_of(value)]
        if text is not None and isinstance(key, str)
    )


@only_looks(())
def describe_scale(scaler: ref[Any] | None) -> Options:
    """The scale of a GradScaler, which it keeps for itself on each rank."""
    found = None if scaler is None else scaler()
    return () if found is None or not found.is_enabled() else (("scale of the GradScaler", repr(found.get_scale())),)


@only_looks(None)
def _text_of(value: object) -> str | None:
    """Their own types' text of numbers and strings: subclasses may say what they like."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 and is_plain(value) and not kind_of(value.device) else None
    if isinstance(value, tuple | list):
        parts = [_text_of(each) for each in value]
        return f"({', '.join(part for part in parts if part is not None)})"
    for kind in _PLAIN:
        if isinstance(value, kind):
            return str(kind.__repr__(value))
    return None


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    for source, target in zip(sources, targets, strict=True):
        for key, value in source.items():
            if key not in _OF_PARAMETERS:
                target[key] = value


_params_of: Callable[[Mapping[str, Any]], list[Tensor]] = itemgetter("params")
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_device_of = torch.Tensor.get_device  # As a number, -1 for host memory: devices are slow to compare
_gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_hooks_of: Callable[[Tensor], object] = attrgetter("_post_accumulate_grad_hooks")


class ParamGroupDiff:
    """Whether a program has changed what is reduced: its parameters, their kind, which of them are trained."""

    def __init__(
        self, param_groups: Sequence[Mapping[str, Any]], left_out: Sequence[Tensor], held: Sequence[Tensor]
    ) -> None:
        """left_out: not reduced as long as they have no gradient or shape; held: frozen, for the gradient they have."""
        self._parameters = parameters = _flat_parameters(param_groups)
        self._flags = list(map(_requires_grad, parameters))
        self._dtypes = list(map(_dtype_of, parameters))
        self._devices = list(map(_device_of, parameters))
        self._hooks = list(map(_hooks_of, parameters))
        self._left_out = left_out
        self._lazy = list(filter(is_lazy, parameters))
        self._held = held

    def sees_change(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        parameters = _flat_parameters(param_groups)
        return (
            len(parameters) != len(self._parameters)
            or not all(map(is_, parameters, self._parameters))
            or list(map(_requires_grad, parameters)) != self._flags
            or list(map(_dtype_of, parameters)) != self._dtypes
            or list(map(_device_of, parameters)) != self._devices
            or not all(map(is_, map(_hooks_of, parameters), self._hooks))
            or any(map(is_not, map(_gradient_of, self._left_out), repeat(None)))
            or any(map(is_, map(_gradient_of, self._held), repeat(None)))
            or not all(map(is_lazy, self._lazy))
        )


def _flat_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(map(_params_of, param_groups)))


def gpu_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the first GPU that a tensor is on, where all are reduced; None where all are in host memory."""
    return next((tensor.device for tensor in tensors if kind_of(tensor.device)), None)


def check_passes(passes: int) -> int:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step must be > 0, got {passes!r}.")
    return passes


@contextmanager
def temporary_gradients(gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    kept = [(parameter, parameter.grad) for parameter in gradients]
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter, before in kept:
            parameter.grad = before


class Comparison:
    """Of one optimizer, or of the parameters of a module, which have no options."""

    def __init__(self, optimizer: Any) -> None:
        self.scaler: ref[Any] | None = None  # The GradScaler that reads the gradients, if any
        self.updates = 0  # Calls of step() that have ended
        self._optimizer = optimizer
        self._reducer: PlannedReducer | None = None
        self._start: dict[str, int] = {}
        self._unused: tuple[int | None, int] = (None, 0)  # Of a plan, when it was read first: reductions without one

    def start_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare these values, those of now, with the next plan. Local."""
        self._start = dict(zip(tensors, value_checksums(list(tensors.values())), strict=True))

    def begin(self, reducer: PlannedReducer) -> None:
        """Compare with the plan that this reducer is about to agree on, what `start_with` got only with that. Local."""
        self._reducer, reducer.proposal.start, self._start = reducer, self._start, {}
        if isinstance(self._optimizer, Optimizer):
            reducer.watch_options(WeakMethod(self._options))

    def _options(self, at_end: bool) -> Options:
        assert self._reducer is not None
        plan, unused = self._reducer.serial, self._reducer.served - self.updates
        if at_end:
            unused += self._reducer.busy
        if plan is None or plan != self._unused[0]:
            self._unused = (plan, unused)
        counted = ("reductions that no step() has used", str(unused - self._unused[1]))
        scale = describe_scale(self.scaler)
        return (*describe_options(self._optimizer.param_groups), *scale, counted)
