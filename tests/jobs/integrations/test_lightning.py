"""A Lightning Trainer on two ranks trains as one process does with the whole batches; the example learns."""

from importlib.util import find_spec

import pytest
from support.job import CHECKOUT, run_job

JOB = CHECKOUT / "tests" / "support" / "integrations" / "lightning_job.py"

pytestmark = [
    pytest.mark.in_turn(1, of=4),
    pytest.mark.timeout(200),
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning: pip install hvlike[integrations]"),
]


def test_a_trainer_on_two_ranks_equals_one_process() -> None:
    output = run_job(JOB, 2, timeout=150).check().stdout
    well = [line.removesuffix(": well") for line in output.splitlines() if line.endswith(": well")]
    assert well == [
        "automatic",
        "manual",
        "what_a_strategy_offers",
        "reducing_twice_is_refused",
        "the_example_learns_and_resumes",
    ]
