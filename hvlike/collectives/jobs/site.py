"""What the jobs of one process set work with."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvlike.collectives.agreement import Verdict
from hvlike.collectives.request import Request
from hvlike.planes.lane import Lanes
from hvlike.planes.packing import Packer
from hvlike.transport.group import Group

Agreed = tuple[Request, Verdict]


@dataclass
class Site:
    """The lanes of a process set, and what is kept between jobs."""

    lanes: Lanes
    packer: Packer = field(default_factory=Packer)

    @property
    def group(self) -> Group:
        """The members of the set."""
        return self.lanes.first.group
