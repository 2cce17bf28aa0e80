"""The examples need packages that the tests of hvlike itself do without."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def packages() -> None:
    """Skip where a package is missing. Only looks: to import them takes a second, on every rank of every run."""
    for name in ("sklearn", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the examples need {name}")
