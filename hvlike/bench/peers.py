"""Whom hvlike is compared with, as far as they can take part in this run."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from hvlike.bench import horovod_job, torch_group
from hvlike.bench.conditions import describe
from hvlike.bench.horovod_job import HorovodJob
from hvlike.bench.torch_group import GLOO, TorchGroup
from hvlike.transport.raw import RawMpi


class Peers:
    """MPI, and gloo and Horovod where they can be had. Collective; use as a context manager."""

    def __init__(
        self, *, without_gloo: str | None = None, without_horovod: str | None = None, backend: str = GLOO
    ) -> None:
        """without_...: why this run does without; None: take it if it is there. backend: torch's, in gloo's place."""
        self.raw = RawMpi()
        self.left_out: list[str] = []
        """One sentence for each that does not take part."""
        self.group: TorchGroup | None = None
        self.horovod: HorovodJob | None = None
        reason = without_gloo or torch_group.unavailable(backend)
        if reason is None:
            self.group = TorchGroup(backend)
        else:
            self.left_out.append(f"Without {backend}: {reason}.")
        reason = without_horovod or horovod_job.unavailable()
        started = reason or horovod_job.start()
        if isinstance(started, HorovodJob):
            self.horovod = started
        else:
            self.left_out.append(f"Without Horovod: {started}.")

    def describe(self, benchmark: str) -> dict[str, Any]:
        """Return the conditions of the run, and who takes no part in it."""
        version = self.horovod.version if self.horovod else None
        return {**describe(benchmark, self.raw), "horovod": version, "left_out": self.left_out}

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the ranks no longer do the same: whoever waits for another would wait in vain.
        if kind is not None:
            return
        if self.horovod is not None:
            self.horovod.close()
        if self.group is not None:
            self.group.close()
        self.raw.free()
