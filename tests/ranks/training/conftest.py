"""What tests of training share."""

import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import pytest


@pytest.fixture
def restarted(hvd: ModuleType) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Start hvlike anew with other knobs."""
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
