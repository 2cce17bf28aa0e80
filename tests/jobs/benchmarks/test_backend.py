"""scripts/bench backend as a user starts it."""

import json
from collections.abc import Callable


def test_every_call_and_step_takes_its_turn_over_both_backends(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("backend"))
    calls = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "send and recv"]
    assert [(each["call"], each["bytes"]) for each in found["calls"]] == [(call, 1024) for call in calls]
    assert [each["model"] for each in found["steps"]] == ["DDP small", "FSDP2 small"]
    for each in found["calls"]:
        assert each["ratios"]["gloo/hvlike"]["of_medians"] > 0
    ddp, fsdp = found["steps"]
    assert set(fsdp["seconds"]) == {"no communication", "hvlike", "gloo"}
    assert set(fsdp["ratios"]) == {"hvlike/gloo"}
    assert set(ddp["seconds"]) == {*fsdp["seconds"], "DDP itself"}, "what no backend can go below"
    assert set(ddp["ratios"]) == {"hvlike/gloo", "hvlike/DDP itself"}
