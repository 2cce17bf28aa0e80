"""What tests of training share."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def restarts(hvd: ModuleType) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Gives what starts hvlike anew with other knobs; in the end it has those that the run was started with."""
    before: dict[str, str | None] = {}

    def restart(knobs: Mapping[str, str]) -> None:
        hvd.shutdown()
        for name, value in knobs.items():
            before.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        hvd.init()

    yield restart
    hvd.shutdown()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
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
