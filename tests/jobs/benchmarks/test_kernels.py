"""scripts/bench kernels as a user starts it: every sum is checked, and every contestant measured."""

import json
from collections.abc import Callable


def test_all_that_add_are_measured(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("kernels"))
    assert found["usable"] > 0
    names = {each["dtype"]: set(each["seconds"]) for each in found["results"]}
    halves = {f"{name}, {count}" for name in ("hvlike", "torch.add") for count in (1, 2)}
    assert names == {"float32": {*halves, "np.add"}, "bfloat16": halves}
