"""The GPU tests, and parity tests with all tensors on a GPU, on a stand-in for the device (tests/support/stand_in)."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.job import CHECKOUT, run_job

pytestmark = pytest.mark.together

FOLDER = CHECKOUT / "tests" / "support" / "stand_in"
PARITY = (
    "tests/ranks/training/optimizer/test_parity.py::test_ranks_together_equal_one_process[AdamW foreach]",
    "tests/ranks/training/optimizer/test_sparse_gradients.py",
)

PROGRAM = """
import faulthandler, sys
faulthandler.enable()
import stand_in
import pytest
sys.exit(pytest.main(["-q", "-x", "-m", "not job", *{tests!r}]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(FOLDER))
    try:
        from build import build
    finally:
        sys.path.remove(str(FOLDER))
    made = build(tmp_path_factory.mktemp("stand_in"))
    if isinstance(made, str):
        pytest.skip(f"the stand-in cannot be made: {made}")
    return made


def run_tests(library: Path, tests: Sequence[str], **settings: str) -> str:
    """What pytest says of these tests at 2 ranks."""
    paths = os.pathsep.join([str(FOLDER), str(CHECKOUT)])
    environment = {"STAND_IN_LIBRARY": str(library), "PYTHONPATH": paths, **settings}
    job = run_job(PROGRAM.format(tests=list(tests)), 2, env=environment, timeout=150)
    return job.check().stdout


def test_the_gpu_tests_pass(library: Path) -> None:
    said = run_tests(library, ["tests/gpu", "tests/ranks/collectives/api/test_pinning.py"])
    assert " passed" in said
    assert "needs a GPU" not in said


def test_tests_of_the_cpu_pass_with_their_tensors_on_a_gpu(library: Path) -> None:
    said = run_tests(library, PARITY, HVLIKE_TEST_DEVICE="cuda")
    assert " passed" in said
