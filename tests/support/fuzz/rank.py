"""What each rank of a long-lived job runs: programs that the driver sends, one after the other.

The driver and the ranks talk by a socket that knows nothing of MPI, so that it works whatever has become of hvlike.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import warnings
from multiprocessing.connection import Client, Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "STAND_IN_LIBRARY" in os.environ:
    import stand_in  # noqa: F401

import torch
from support.devices import OnDevice
from support.fuzz import models
from support.fuzz.hvlike_world import HvlikeWorld
from support.fuzz.outcomes import Outcome
from support.fuzz.programs import TORCH, Program
from support.fuzz.training import Training, run_beside
from torch.utils.checkpoint import checkpoint

import hvlike as hvd


class Log(logging.Handler):
    """Keeps the warnings of hvlike."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(knobs: dict[str, str]) -> HvlikeWorld:
    """Start hvlike, anew where it runs."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    hvd.shutdown()
    for name in ("HVLIKE_OVERLAP", "HVLIKE_RANKS_PER_NODE"):
        os.environ.pop(name, None)
    os.environ.update(knobs)
    hvd.init()
    return HvlikeWorld()


def run(world: HvlikeWorld, program: Program, log: Log) -> Outcome | tuple[Outcome, Outcome]:
    """Run one program."""
    log.lines.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if program.kind in TORCH:
            # Few jobs use it, and it takes long to import.
            from support.fuzz.torch_world import TorchWorld, groups

            over_hvlike, over_gloo = (TorchWorld(group) for group in groups())
            first = world if program.kind == "ddp beside gloo" else over_hvlike
            return Training(first, program).run(), Training(over_gloo, program).run()
        if program.second is not None:
            trainings = Training(world, program, label="first."), Training(world, program.second, label="second.")
            return run_beside(*trainings, threads=program.threads)
        outcome = Training(world, program).run()
    outcome.log = list(log.lines)
    return outcome


def serve(driver: Connection) -> None:
    """Do what the driver says until it has gone."""
    log = Log()
    logging.getLogger("hvlike").addHandler(log)
    world = None
    while True:
        kind, value = driver.recv()
        if kind == "start":
            world = start(value)
            driver.send("started")
        elif kind == "run":
            assert world is not None
            driver.send(run(world, value, log))
        else:
            return


def warm_up() -> None:
    """Have torch import what it imports at the first use, for which a program has no time."""
    row = torch.ones(1, 1, requires_grad=True)
    layer = torch.nn.Linear(1, 1)
    checkpoint(layer, row, use_reentrant=False).sum().backward()
    torch.optim.Adam(layer.parameters()).step()


def main() -> None:
    """Connect, serve, end."""
    torch.set_num_threads(1)
    warm_up()
    hvd.init()
    gc.freeze()
    stack = Path(sys.argv[1]).with_name(f"stack-{hvd.rank()}")
    with Client(sys.argv[1], family="AF_UNIX") as driver, stack.open("w") as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=False)
        driver.send((hvd.rank(), os.getpid()))
        if len(sys.argv) > 2:
            # With its number: threads that are started later have the first one as their current device.
            models.device = hvd.pin_device(sys.argv[2])
        with OnDevice(models.device) if len(sys.argv) > 2 else contextlib.nullcontext():
            serve(driver)
    hvd.shutdown()


if __name__ == "__main__":
    main()
