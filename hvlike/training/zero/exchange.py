"""Which rank owns which parameter; how gradients get to the owners, and updated parameters to all ranks.

A GradientReduction reduces each gradient on the rank that owns its parameter. A ParameterExchange writes each parameter
from its owner to the others.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.backends.base import Backend, bytes_of
from hvlike.backends.cuda.device_backend import home_of
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.requests.reduction import Average, Max, Operand, arithmetic_of, is_dense, row_by_row
from hvlike.collectives.requests.request import order_in_memory
from hvlike.errors import UsageError, WrongTypeError
from hvlike.training.gradients.aliases import first_sharers
from hvlike.training.gradients.checksums import value_checksums
from hvlike.training.gradients.grad_state import declared_dtype, gradient_dtype
from hvlike.training.gradients.planned_queue import Packing
from hvlike.training.gradients.steps_in_backward import refuse_optimizer_in_backward
from hvlike.transport.loop.coroutine import Coroutine
from hvlike.transport.memory.dtypes import dtype_name
from hvlike.transport.memory.own_memory import check_parameter

Parameters: TypeAlias = list[Tensor] | list[dict[str, Any]]


def check_parameters(params: object) -> Parameters:
    if isinstance(params, Tensor):
        raise WrongTypeError(f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}")
    try:
        items: list[Any] = list(params)  # type: ignore[call-overload]  # whatever is no iterable is refused below
    except TypeError as error:
        raise WrongTypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        ) from error
    if not items:
        raise UsageError("ZeroRedundancyOptimizer got an empty parameter list")
    if all(isinstance(item, Tensor) for item in items):
        check_type(items)
        return items
    if not all(isinstance(item, dict) for item in items):
        raise WrongTypeError("`params` argument should be an iterable of Tensors or dicts")
    groups = []
    for number, group in enumerate(items):
        if "params" not in group:
            raise UsageError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters in the "
                f"group; group {number} has none."
            )
        held = group["params"]
        # A set has no order: torch refuses it with its own text.
        groups.append(dict(group) if isinstance(held, (Tensor, set)) else {**group, "params": list(held)})
    check_type([each for group in groups for each in group["params"] if isinstance(each, Tensor)])
    return groups


def check_type(parameters: list[Tensor]) -> None:
    for place, parameter in enumerate(parameters):
        refuse_optimizer_in_backward(f"parameter {place}", parameter)
    for each in parameters:
        check_parameter("ZeroRedundancyOptimizer, a parameter", each)
    types = list(dict.fromkeys(map(torch.typename, parameters)))
    sparse = next((torch.typename(each) for each in parameters if each.layout is not torch.strided), None)
    if sparse is not None or len(types) > 1:
        raise UsageError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
            + (sparse or f"both {types[0]} and {types[1]}. Make one optimizer for each type.")
        )


def assign_owners(groups: Sequence[Sequence[int]], ranks: int, firsts: Sequence[int] | None = None) -> list[list[int]]:
    """The largest first, each goes to the rank that holds least: [9, 7, 5, 3] on 2 ranks -> owners [0, 1, 1, 0].

    firsts: for each, the place of the first one that it shares memory with: these have one owner.
    """
    held = [0] * ranks
    owner_of: dict[int, int] = {}
    result = []
    begin = 0
    for sizes in groups:
        owners = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            first = begin + index if firsts is None else firsts[begin + index]
            owner = owner_of.setdefault(first, held.index(min(held)))
            owners[index] = owner
            held[owner] += sizes[index]
        result.append(owners)
        begin += len(sizes)
    return result


class Partition:
    def __init__(self, groups: Sequence[Mapping[str, Any]], ranks: int) -> None:
        self.ranks = ranks
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self.firsts = first_sharers(self.parameters)
        sizes = [[parameter.numel() for parameter in group["params"]] for group in groups]
        owners = assign_owners(sizes, ranks, self.firsts)
        self.owners: list[int] = [owner for group in owners for owner in group]
        self._groups = groups
        self._owners_by_group = owners

    def owned(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def groups_of(self, rank: int) -> list[dict[str, Any]]:
        """The parameter groups, with all options and the parameters that `rank` owns; some may be empty."""
        return [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [each for each, owner in zip(group["params"], owners, strict=True) if owner == rank],
            }
            for group, owners in zip(self._groups, self._owners_by_group, strict=True)
        ]

    def check_views(self) -> None:
        """Raise UsageError where views of a bucket would take parameters apart that share memory."""
        for place, first in enumerate(self.firsts):
            if place != first:
                raise UsageError(
                    f"ZeroRedundancyOptimizer: parameters number {first} and {place} share memory, which "
                    "parameters_as_bucket_view=True would take apart. Leave it out, or pass one of them."
                )

    def describe(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        described: dict[str, Any] = {"number of parameter groups": len(self._groups)}
        firsts = iter(self.firsts)
        for number, group in enumerate(self._groups):
            described[f"number of parameters in group {number}"] = len(group["params"])
            for index, each in enumerate(group["params"]):
                name = f"parameter {index} of group {number}"
                described[f"shape of {name}"] = tuple(each.shape)
                described[f"dtype of {name}"] = dtype_name(each.dtype)
                described[f"dtype of the gradient of {name}"] = dtype_name(declared_dtype(each))
                described[f"order in memory of {name}"] = order_in_memory(each)
                described[f"requires_grad of {name}"] = each.requires_grad
                described[f"first parameter in the memory of {name}"] = next(firsts)
        return described


_log = logging.getLogger("hvlike")


def warn_if_gradients_differ(
    name: str, gradients: Sequence[Tensor | None], process_set: ProcessSet | None, *, warns: bool
) -> None:
    """Compare the dense gradients of the ranks. Collective; blocks. For ranks outside of a Join context."""
    mine = zlib.crc32(repr(value_checksums([each for each in gradients if each is not None])).encode())
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device="cpu")
    both = allreduce(extremes, op=ReduceOp.MAX, name=f"{name}.are gradients equal", process_set=process_set)
    highest, lowest = both.tolist()
    if warns and highest != -lowest:
        _log.warning(
            "the gradients differ between the ranks in the first step of a ZeroRedundancyOptimizer, so each parameter "
            "is updated with those of one rank alone. Wrap the model in hvlike.nn.DistributedDataParallel, or pass "
            "reduce_gradients=True."
        )


def flatten(parameters: Sequence[Tensor], owners: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Make the parameters views of one flat tensor for each owner, device and dtype; return these and their owners."""
    members: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for parameter, owner in zip(parameters, owners, strict=True):
        members.setdefault((owner, parameter.device, parameter.dtype), []).append(parameter)
    flats = []
    for (_, device, dtype), held in members.items():
        with torch.inference_mode(False):
            flat = torch.empty(sum(each.numel() for each in held), dtype=dtype, device=device)
        start = 0
        for parameter in held:
            strides = parameter.stride() if is_dense(parameter.shape, parameter.stride()) else None
            view = flat.as_strided(parameter.shape, strides or row_by_row(parameter.shape), start)
            view.copy_(parameter.detach())
            parameter.data = view
            start += view.numel()
        flats.append(flat)
    return flats, [owner for owner, _, _ in members]


class GradientReduction:
    def __init__(self, partition: Partition, rank: int) -> None:
        self._rank = rank
        self._partition = partition
        self._parameters = partition.parameters
        self._packing = self._packing_for([gradient_dtype(each) for each in self._parameters])

    @property
    def is_incomplete(self) -> bool:
        """Whether this rank lacks the gradient of a parameter."""
        return any(parameter.grad is None for parameter in self._parameters)

    def run(self, backend: Backend, *, active: bool, incomplete: bool) -> Coroutine[None]:
        """Give this rank's parameters the mean as gradient, all others none.

        incomplete: some active rank lacks some. They count as zeros; a gradient that no rank has stays None.
        """
        absent = (yield from self._find_absent(backend, active=active)) if incomplete else set[int]()
        gradients = self._contributions(active=active)
        if not self._packing.fits(gradients):
            self._packing = self._packing_for([gradient.dtype for gradient in gradients])
        operands = self._packing.pack(gradients, home=home_of(backend))
        pieces = list(zip((operand.flat for operand in operands), self._packing.owners, strict=True))
        for dtype in dict.fromkeys(flat.dtype for flat, _ in pieces):
            flats, owners = zip(*((flat, owner) for flat, owner in pieces if flat.dtype is dtype), strict=True)
            arithmetic = arithmetic_of(dtype, Average, self._partition.ranks, 1.0, 1.0)
            yield from backend.reduce_scatter(flats, owners, arithmetic)
        self._packing.unpack(gradients, operands, [self._rank])
        for place, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            mine = self._partition.owners[place] == self._rank and place not in absent
            parameter.grad = gradient if mine else None

    def _packing_for(self, dtypes: list[torch.dtype]) -> Packing:
        # Zeros in place of a gradient lie like the parameter, as most gradients do.
        forms = [
            torch.empty_like(each, dtype=dtype, device="meta")
            for each, dtype in zip(self._parameters, dtypes, strict=True)
        ]
        return Packing(forms, self._partition.owners)

    def _find_absent(self, backend: Backend, *, active: bool) -> Coroutine[set[int]]:
        """The gradients that no active rank has, by the place of the parameter."""
        has = [active and parameter.grad is not None for parameter in self._parameters]
        present = torch.tensor(has, dtype=torch.int32, device="cpu")
        yield from backend.allreduce([present], arithmetic_of(torch.int32, Max, self._partition.ranks, 1.0, 1.0))
        return {place for place, found in enumerate(present.tolist()) if not found}

    def _contributions(self, *, active: bool) -> list[Tensor]:
        spare: dict[torch.dtype, Tensor] = {}
        gradients = []
        for parameter, owner in zip(self._parameters, self._partition.owners, strict=True):
            gradient = parameter.grad if active else None
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            if gradient is None and owner == self._rank:
                gradient = torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)
            if gradient is None:
                # Only read: the same memory serves all parameters of other ranks.
                count, dtype = parameter.numel(), gradient_dtype(parameter)
                if dtype not in spare or spare[dtype].numel() < count:
                    spare[dtype] = torch.zeros(count, dtype=dtype, device=parameter.device)
                gradient = spare[dtype][:count].view(parameter.shape)
            gradients.append(gradient)
        return gradients


class ParameterExchange:
    """Writes each parameter from its owner to the others; a frozen one only where its owner has a gradient for it."""

    def __init__(self, partition: Partition, rank: int, *, as_buckets: bool) -> None:
        self._rank = rank
        self._others = [other for other in range(partition.ranks) if other != rank]
        moving = [place for place, parameter in enumerate(partition.parameters) if parameter.requires_grad]
        self._moving = self._parameters = [partition.parameters[place] for place in moving]
        self._owners = [partition.owners[place] for place in moving]
        self._addresses: list[int] | None = None
        if as_buckets:
            self._flatten()
        else:
            self._packing = Packing(self._moving, self._owners)
        self._frozen: list[list[Tensor]] = [[] for _ in range(partition.ranks)]
        for parameter, owner in zip(partition.parameters, partition.owners, strict=True):
            if not parameter.requires_grad:
                self._frozen[owner].append(parameter)

    def _flatten(self) -> None:
        self._moving, owners = flatten(self._parameters, self._owners)
        self._packing = Packing(self._moving, owners)
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]

    def run(self, backend: Backend, gradients: Mapping[Tensor, Tensor | None] | None = None) -> Coroutine[None]:
        """gradients: that this rank has stepped its share with, where they are not in `.grad`."""
        addresses = self._addresses
        # The program may have moved or converted some.
        if addresses is None:
            if not self._packing.fits(self._moving):
                self._packing = Packing(self._moving, self._owners)
        elif addresses != [parameter.data_ptr() for parameter in self._parameters]:
            self._flatten()
        operands = self._packing.pack(self._moving, owner=self._rank, home=home_of(backend))
        yield from _gather(backend, operands, self._packing.owners)
        self._packing.unpack(self._moving, operands, self._others)
        if any(self._frozen):
            yield from self._gather_thawed(backend, gradients)

    def _gather_thawed(self, backend: Backend, gradients: Mapping[Tensor, Tensor | None] | None) -> Coroutine[None]:
        """Write the frozen parameters that have a gradient now, after each owner has told which."""
        flags = [torch.zeros(len(frozen), dtype=torch.uint8, device="cpu") for frozen in self._frozen]
        for index, parameter in enumerate(self._frozen[self._rank]):
            flags[self._rank][index] = (parameter.grad if gradients is None else gradients.get(parameter)) is not None
        yield from backend.gather(flags, list(range(len(flags))))
        thawed = [
            (parameter, owner)
            for owner, (frozen, said) in enumerate(zip(self._frozen, flags, strict=True))
            for parameter, moves in zip(frozen, said.tolist(), strict=True)
            if moves
        ]
        home = home_of(backend)
        operands = [Operand(parameter, order_in_memory(parameter), home=home) for parameter, _ in thawed]
        yield from _gather(backend, operands, [owner for _, owner in thawed])
        for operand in operands:
            operand.write_back()


def _gather(backend: Backend, operands: Sequence[Operand], owners: Sequence[int]) -> Coroutine[None]:
    if operands:
        yield from backend.gather([bytes_of(operand.flat) for operand in operands], owners)
