"""Names of parameters: what the ranks match gradients by, and what errors call them. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvlike.errors import UsageError

_EXPECTED = (
    "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
)


def find_duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def check_named_parameters(named_parameters: object) -> dict[Tensor, str]:
    """Return the names given by the user, by parameter. A parameter shared under two names keeps the first.

    Raises: UsageError for anything but pairs (name, parameter), and for a name given to two parameters.
    """
    if not isinstance(named_parameters, Iterable) or isinstance(named_parameters, (Mapping, Tensor, str)):
        raise UsageError(f"{_EXPECTED} Got {type(named_parameters).__name__}.")
    pairs: list[Any] = list(named_parameters)
    for pair in pairs:
        if not (_is_named(pair)):
            raise UsageError(f"{_EXPECTED} Got an item of type {type(pair).__name__}.")
    names: dict[Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    # A list that names one parameter twice is as wrong as one that uses a name for two.
    repeated = find_duplicates(name for name, _ in pairs)
    if repeated:
        raise UsageError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}")
    return names


def _is_named(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)


def check_all_named(names: Mapping[Tensor, str], parameters: Iterable[Tensor]) -> None:
    """Check that each of the optimizer's parameters has a name.

    Raises: UsageError, with Horovod's text and the shapes of those without.
    """
    unnamed = [parameter for parameter in parameters if parameter not in names]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(str(id(parameter)) for parameter in unnamed)} "
            f"(shapes {', '.join(str(list(parameter.shape)) for parameter in unnamed)}). "
            "Pass the names of all parameters of the optimizer, or none."
        )


def name_parameters(param_groups: Sequence[Mapping[str, Any]], given: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return a name for each parameter of the groups: the given one, torch's, or `noname.<group>.<index>`.

    Names from torch are those of an optimizer made from named parameters (`param_names` in its groups).
    """
    names: dict[Tensor, str] = {}
    taken: set[str] = set()
    for parameter, proposals in _proposals(param_groups, given):
        name = next(proposal for proposal in proposals if proposal not in taken)
        names[parameter] = name
        taken.add(name)
    return names


def _proposals(
    param_groups: Sequence[Mapping[str, Any]], given: Mapping[Tensor, str]
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield each parameter with its possible names, best first; the last is always free."""
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            automatic = f"noname.{number}.{index}"
            known = [given.get(parameter), *group.get("param_names", [])[index : index + 1]]
            yield parameter, [*(name for name in known if name), automatic, f"{automatic} of {number}.{index}"]
