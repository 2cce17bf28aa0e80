"""What tests of training share."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def restarts(hvd: ModuleType) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Gives what starts hvlike anew with other knobs; in the end it runs without them."""
    changed: list[str] = []

    def restart(knobs: Mapping[str, str]) -> None:
        hvd.shutdown()
        changed.extend(knobs)
        os.environ.update(knobs)
        hvd.init()

    yield restart
    hvd.shutdown()
    for name in changed:
        os.environ.pop(name, None)
    hvd.init()


@pytest.fixture
def restarted(hvd: ModuleType) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Start hvlike anew with other knobs."""
    with restarts(hvd) as restart:
        yield restart


@pytest.fixture(scope="module")
def beside_backward(hvd: ModuleType) -> Iterator[None]:
    """Small buckets are reduced beside backward, from here to the end of the file."""
    with restarts(hvd) as restart:
        restart({"HVLIKE_OVERLAP": "1", "HVLIKE_BUCKET_BYTES": "64"})
        yield
