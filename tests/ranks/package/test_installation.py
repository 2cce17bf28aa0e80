"""Which hvlike the tests import: this checkout, or what scripts/test has installed from the wheel."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hvlike

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]

ROOT = Path(__file__).resolve().parents[3]


def test_the_hvlike_that_is_meant_is_imported() -> None:
    place = Path(hvlike.__file__).resolve()
    if os.environ.get("HVLIKE_TEST_INSTALLED"):
        assert Path(sys.prefix).resolve() in place.parents
        assert place.parents[1].name == "site-packages"
    else:
        assert place.parents[1] == ROOT


def test_the_version_is_that_of_what_is_installed() -> None:
    if os.environ.get("HVLIKE_TEST_INSTALLED"):
        assert version("hvlike") == hvlike.__version__
