"""What soaks share: steps that are drawn, memory that is watched, and a wait until nothing is left."""

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hvlike as hvd

GROWTH_BYTES = 8 << 20
"""What a rank may have grown by at the end, however long the soak: freed memory that the allocator keeps."""
SETTLE_SECONDS = 20.0


class Driver:
    """Draws what this rank does next; a soak says what there is to draw, and how often."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._rank, self._size = hvd.rank(), hvd.size()

    def kinds(self) -> dict[Callable[[], None], int]:
        """What there is, with weights."""
        raise NotImplementedError

    def step(self) -> str:
        """Take one step; returns its name."""
        kinds = self.kinds()
        (kind,) = self._draw.choices(list(kinds), list(kinds.values()))
        kind()
        return kind.__name__

    def _somebody(self) -> int:
        return self._draw.randrange(self._size)

    def _path(self) -> list[int]:
        return [self._somebody() for _ in range(self._draw.randint(1, 4))]


class Watch:
    """Memory of this process at so many moments, evenly spread over what follows the warm-up."""

    def __init__(self, total: int, *, warm_up: float, looks: int) -> None:
        """total: the amount of work. warm_up: the part of it that is not watched."""
        self._begin, self._step = total * warm_up, total * (1 - warm_up) / looks
        self.done: list[int] = []
        self.resident: list[int] = []

    def look(self, done: int) -> None:
        """So much of the work is done."""
        if done >= self._begin + len(self.done) * self._step:
            self.done.append(done)
            self.resident.append(resident_bytes())

    @property
    def growth(self) -> float:
        """Bytes from the first to the last quarter of the looks, medians."""
        quarter = max(1, len(self.resident) // 4)
        first, last = (sorted(each)[len(each) // 2] for each in (self.resident[:quarter], self.resident[-quarter:]))
        return float(last - first)

    @property
    def slope(self) -> float:
        """Bytes for each piece of the work, least squares."""
        work, resident = (torch.tensor(each, dtype=torch.float64)[:, None] for each in (self.done, self.resident))
        design = torch.cat([work - work.mean(), torch.ones_like(work)], dim=1)
        return float(torch.linalg.lstsq(design, resident).solution[0])


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def settle(is_empty: Callable[[], bool]) -> None:
    """Wait until what nobody waits for is over, and what is on its way has come."""
    gc.collect()
    end = time.monotonic() + SETTLE_SECONDS
    while not is_empty() and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
