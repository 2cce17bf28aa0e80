"""parameters_as_bucket_view: the parameters of each owner lie in one flat tensor, which travels as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvlike.collectives.operand import Operand, is_dense, row_by_row


class Buckets:
    """A flat tensor for each owner and device, and the parameters as views of it."""

    def __init__(self, parameters: Sequence[Tensor], owners: Sequence[int]) -> None:
        self._parameters = list(parameters)
        self._owners = list(owners)
        self.owners: list[int] = []
        """The owner of each flat tensor."""
        self._flats: list[Tensor] = []
        self._places: list[int] = []
        self._fill()

    def operands(self, home: torch.device | None = None) -> list[Operand]:
        """The flat tensors, on `home`. Parameters that have left them, as the model was moved or converted, come back.

        home: the device that they travel from, None for host memory.
        """
        if [parameter.data_ptr() for parameter in self._parameters] != self._places:
            self._fill()
        return [Operand(flat, None, home=home) for flat in self._flats]

    def _fill(self) -> None:
        """Move the parameters into new flat tensors; their values stay."""
        self.owners, self._flats = [], []
        members: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            members.setdefault((owner, parameter.device, parameter.dtype), []).append(parameter)
        for (owner, device, dtype), parameters in members.items():
            with torch.inference_mode(False):
                flat = torch.empty(sum(each.numel() for each in parameters), dtype=dtype, device=device)
            start = 0
            for parameter in parameters:
                strides = parameter.stride() if is_dense(parameter.shape, parameter.stride()) else None
                view = flat.as_strided(parameter.shape, strides or row_by_row(parameter.shape), start)
                view.copy_(parameter.detach())
                parameter.data = view
                start += view.numel()
            self.owners.append(owner)
            self._flats.append(flat)
        self._places = [parameter.data_ptr() for parameter in self._parameters]
