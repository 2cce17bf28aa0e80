"""hvlike.integrations.huggingface with accelerate alone."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import sys
sys.modules["transformers"] = None
from hvlike.integrations import huggingface
assert issubclass(huggingface.HvlikeAccelerator, __import__("accelerate").Accelerator)
try:
    huggingface.HvlikeTrainer(model=None)
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate: pip install hvlike[integrations]")
def test_the_accelerator_needs_no_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.startswith("HvlikeTrainer needs transformers: pip install transformers."), done.stderr
