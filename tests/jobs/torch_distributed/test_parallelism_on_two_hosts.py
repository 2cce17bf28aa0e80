"""What others build upon torch.distributed, on two hosts of two ranks: laws of tests/ranks, one of each kind."""

import pytest
from support.hosts import hosts
from support.job import CHECKOUT

FOLDER = CHECKOUT / "tests" / "ranks" / "torch_distributed" / "parallelism"
LAWS = {
    "test_data_parallel.py": "default or no_sync or half or shadow",
    "test_communication_hooks.py": "fp16_compress_hook or chain",
    "test_sharding.py": "second or shared_out or checkpoint",
    "test_dtensor.py": "two_dimensions or partial_sums or sequence or fully_shard",
    "test_pipelines.py": "1F1B or copies",
    "test_hvlike_on_groups.py": "half or shared_out",
}
RUN_PYTEST = """
import os, sys
import pytest
os.chdir({root!r})
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.in_turn(1, of=3)
@pytest.mark.timeout(200)
def test_laws_between_hosts() -> None:
    program = RUN_PYTEST.format(root=str(CHECKOUT))
    files = [str(FOLDER / name) for name in LAWS]
    chosen = " or ".join(f"({name.removesuffix('.py')} and ({laws}))" for name, laws in LAWS.items())
    with hosts(2) as machines:
        # These ranks are not those of the outer run: they keep no records.
        job = machines.run(program, 2, args=[*files, "-k", chosen], env={"HVLIKE_TEST_RECORDS": ""}, timeout=150)
    assert " passed" in job.check().stdout
