"""python -m hvlike bench zero as a user starts it."""

import json

from support.job import MODULE, run_job

SHORT = ["bench", "zero", "--width", "32", "--layers", "2", "--repetitions", "1", "--bucket-view", "--json"]


def test_every_rank_keeps_its_share_of_the_state() -> None:
    found = json.loads(run_job(MODULE, 2, args=SHORT).check().stdout)
    whole = found["state_bytes"].pop("DDP + Adam")
    assert whole[0] == whole[1] > 8 * found["elements"]
    assert set(found["state_bytes"]) == {"DDP + ZeRO", "DDP + ZeRO, views", "ZeRO alone"}
    for shares in found["state_bytes"].values():
        assert sum(shares) == whole[0]
        assert max(shares) < 0.55 * whole[0]
    assert max(found["gradient_bytes"]["ZeRO alone"]) < 0.55 * 4 * found["elements"]
    assert all(each["median"] > 0 for each in found["seconds"].values())
