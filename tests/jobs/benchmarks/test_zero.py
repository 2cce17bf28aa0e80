"""scripts/bench zero as a user starts it."""

import json
from collections.abc import Callable


def test_every_rank_keeps_its_share_of_the_state(output_of: Callable[[str], str]) -> None:
    found = json.loads(output_of("zero"))
    whole = found["state_bytes"].pop("DDP + Adam")
    assert whole[0] == whole[1] > 8 * found["elements"]
    assert set(found["state_bytes"]) == {"DDP + ZeRO", "DDP + ZeRO, views", "ZeRO alone"}
    for shares in found["state_bytes"].values():
        assert sum(shares) == whole[0]
        assert max(shares) < 0.55 * whole[0]
    assert max(found["gradient_bytes"]["ZeRO alone"]) < 0.55 * 4 * found["elements"]
    assert all(each["median"] > 0 for each in found["seconds"].values())
