"""python -m hvlike bench waiting, as a user starts it: every wait and every kind of work is measured."""

import json

from support.job import MODULE, run_job

WORKS = {"matmul", "forward and backward", "small operations", "pure Python"}


def test_json_has_all_that_was_measured() -> None:
    job = run_job(MODULE, 2, args=["bench", "waiting", "--repetitions", "1", "--json"]).check()
    found = json.loads(job.stdout)
    assert len(found["results"]) == 2
    for place in found["results"].values():
        assert set(place["slowdown"]) == WORKS
        for waits in place["slowdown"].values():
            assert set(waits) == {"nothing, again", "a named allreduce", "a bucket of gradients"}
        assert set(place["latency"]) == WORKS | {"(waits in synchronize)"}
        assert all(each["median"] > 0 for each in place["latency"].values())
