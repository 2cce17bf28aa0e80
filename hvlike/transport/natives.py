"""MPI's own names for what the planes reduce: the datatypes, operations and constants that a communicator needs."""

from __future__ import annotations

from typing import Any

import torch

from hvlike.transport.dtypes import Kind, element_of, mpi_datatype

_ORDERINGS = ("MIN", "MAX")


class Natives:
    """Constants of the MPI that is running. Made only where a communicator exists, so MPI has been started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.in_place: Any = MPI.IN_PLACE
        self.byte: Any = MPI.BYTE

    def reduction(self, dtype: torch.dtype, op_name: str) -> tuple[Any, Any] | None:
        """Return (datatype, operation) for MPI's own reduction of `dtype`, or None where it is not to be trusted.

        op_name: SUM, PROD, MIN or MAX. Not trusted: 16-bit floats (MPI sums their bytes or refuses), the minimum
        and maximum of floats (NaN is kept or lost by the order of the operands, which differs between the ranks),
        and products of complex numbers (compiled with fused operations they depend on that order too).
        """
        datatype = mpi_datatype(self._mpi, dtype)
        kind = element_of(dtype).kind
        if datatype is None:
            return None
        if kind is Kind.FLOAT and op_name in _ORDERINGS:
            return None
        if kind is Kind.COMPLEX and op_name == "PROD":
            return None
        if kind is Kind.BOOL:
            op_name = "MAX" if op_name in ("SUM", "MAX") else "MIN"
        return datatype, getattr(self._mpi, op_name)
