"""Who a worker is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the rank of a worker; a value: equal where both are, usable as a key, sendable.

    name: as given to init_rpc. id: its rank.
    Source: torch.distributed.rpc.WorkerInfo.
    """

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerInfo, (self.name, self.id)
