"""A Hugging Face Trainer on two ranks trains as one process does with the whole batches; the example learns."""

from importlib.util import find_spec

import pytest
from support.job import CHECKOUT, run_job

JOB = CHECKOUT / "tests" / "support" / "integrations" / "huggingface_job.py"
IS_THERE = find_spec("transformers") is not None and find_spec("accelerate") is not None

pytestmark = [
    pytest.mark.in_turn(1, of=4),
    pytest.mark.timeout(200),
    pytest.mark.skipif(not IS_THERE, reason="needs transformers and accelerate: pip install hvlike[integrations]"),
]


def test_a_trainer_on_two_ranks_equals_one_process() -> None:
    # No look at the internet for models that are not used.
    output = run_job(JOB, 2, timeout=150, env={"HF_HUB_OFFLINE": "1"}).check().stdout
    well = [line.removesuffix(": well") for line in output.splitlines() if line.endswith(": well")]
    assert well == [
        "training",
        "going_on_from_a_checkpoint",
        "an_accelerator_by_itself",
        "an_accelerator_with_a_hook",
        "the_example_learns",
    ]
