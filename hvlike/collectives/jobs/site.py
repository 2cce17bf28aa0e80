"""What the jobs of one process set work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvlike.collectives.agreement import Verdict
from hvlike.collectives.request import Request
from hvlike.config import Knobs
from hvlike.planes.cuda.choice import Choice
from hvlike.planes.lane import Lanes
from hvlike.planes.packing import Packer
from hvlike.transport.group import Group

if TYPE_CHECKING:
    from hvlike.planes.cuda.opening import DevicePlanes

Agreed = tuple[Request, Verdict]


@dataclass
class Site:
    """The lanes of a process set, and what is kept between jobs."""

    lanes: Lanes
    knobs: Knobs
    packer: Packer = field(default_factory=Packer)
    _devices: DevicePlanes | None = None

    @property
    def group(self) -> Group:
        """The members of the set."""
        return self.lanes.first.group

    @property
    def devices(self) -> DevicePlanes:
        """What opens planes for tensors of a GPU; nothing of it is imported before the first one comes."""
        if self._devices is None:
            from hvlike.planes.cuda.opening import DevicePlanes

            self._devices = DevicePlanes(self.group, self.knobs, self.group.world.host)
        return self._devices

    @property
    def device_choice(self) -> Choice | None:
        """The plane that was chosen for them, and why; None before the first one."""
        return None if self._devices is None else self._devices.choice

    def close(self) -> None:
        """Give back what the planes of a device share."""
        if self._devices is not None:
            self._devices.close()
