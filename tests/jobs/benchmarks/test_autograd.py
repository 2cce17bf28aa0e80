"""scripts/bench autograd as a user starts it."""

import json
from collections.abc import Callable

import pytest
from torch.distributed import rpc as torch_rpc


@pytest.mark.skipif(not torch_rpc.is_available(), reason="this torch was built without TensorPipe")
def test_json_has_all_that_was_measured(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("autograd"))
    used, unused = found["results"]
    assert set(used["found"]) == {"safe", "smart", "TensorPipe", "one process"}
    assert set(unused["found"]) == {"safe", "smart"}
    assert set(used["ratios"]) == {"safe/TensorPipe", "smart/TensorPipe", "smart/safe"}
    assert all(each["median"] > 0 for result in (used, unused) for each in result["found"].values())
    assert len(found["analysis"]) == 3
