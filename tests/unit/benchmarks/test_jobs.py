"""Jobs of a benchmark are started outside of jobs."""

import pytest

from benchmarks.jobs import refuse_inside_a_job
from hvlike.errors import UsageError


def test_ranks_of_a_job_start_no_jobs() -> None:
    refuse_inside_a_job({}, "scaling")
    with pytest.raises(UsageError, match="without mpirun"):
        refuse_inside_a_job({"PMI_SIZE": "2"}, "scaling")
