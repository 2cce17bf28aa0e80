"""Seeing whether the host waits for the device."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WAITS = ("questions", "synchronisations")


@contextmanager
def host_does_not_wait() -> Iterator[None]:
    """Fail where something in the block makes the host wait for a GPU, a question such as item() or a synchronisation.

    CUDA itself is asked to raise; the stand-in for it counts.
    """
    stand_in = sys.modules.get("stand_in")
    if stand_in is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That it does not find all of them
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    before = stand_in.counts()
    yield
    after = stand_in.counts()
    assert [after[each] - before[each] for each in _WAITS] == [0, 0]
