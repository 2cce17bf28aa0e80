"""scripts/bench waiting, as a user starts it: every wait and every kind of work is measured."""

import json
from collections.abc import Callable

WORKS = {"matmul", "forward and backward", "small operations", "pure Python"}


def test_json_has_all_that_was_measured(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("waiting"))
    assert len(found["results"]) == 2
    for place in found["results"].values():
        assert set(place["slowdown"]) == WORKS
        for waits in place["slowdown"].values():
            assert set(waits) == {"nothing, again", "a named allreduce", "a bucket of gradients"}
        assert set(place["latency"]) == WORKS | {"(waits in synchronize)"}
        assert all(each["median"] > 0 for each in place["latency"].values())
