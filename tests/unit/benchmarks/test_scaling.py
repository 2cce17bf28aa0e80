"""bench scaling: what ranks have sent is summed up per step and rank."""

import pytest

from benchmarks.scaling import Agreement, RankCounts, Result, as_text, panels, summarise
from hvlike.transport.messages.traffic import Sent

COORDINATOR = RankCounts(Sent({"responses": 12}, 1200, 4, 400, 2, 80), [0.1, 0.2, 0.3, 0.4])
MEMBER = RankCounts(Sent({"ready": 4}, 400, 8, 800, 2, 80), [0.5, 0.1, 0.2, 0.3])
CONDITIONS = {"tensors": 8, "bytes": 4096, "steps": 4, "cores": 2, "ranks_per_node": None, "launcher": "/bin/mpirun"}


def test_counts_are_per_step_and_rank() -> None:
    way = summarise([COORDINATOR, MEMBER], steps=4)
    assert (way.control, way.most_control, way.control_bytes) == (2.0, 3.0, 200.0)
    assert way.kinds == {"ready": 0.5, "responses": 1.5}
    assert (way.data_messages, way.data_bytes, way.collectives, way.collective_bytes) == (1.5, 150.0, 0.5, 20.0)


def test_times_are_those_of_the_slowest_rank() -> None:
    assert summarise([COORDINATOR, MEMBER], steps=4).seconds == pytest.approx(0.35)  # of 0.5, 0.2, 0.3, 0.4


def test_one_step_is_enough() -> None:
    way = summarise([RankCounts(Sent(), [0.25])], steps=1)
    assert (way.control, way.most_control, way.seconds, way.quartiles) == (0.0, 0.0, 0.25, [0.25, 0.25])


def test_the_table_names_what_is_odd() -> None:
    calm = summarise([COORDINATOR, MEMBER], steps=4)
    late = summarise([COORDINATOR, RankCounts(Sent({"waiting": 1}, 100), MEMBER.seconds)], steps=4)
    assert "waited for half a second" not in as_text(CONDITIONS, [Result(2, 1, {"negotiated": calm})])
    text = as_text({**CONDITIONS, "ranks_per_node": 2}, [Result(2, 1, {"negotiated": late})])
    assert "waited for half a second" in text
    assert "nodes emulated: 2 ranks each" in text


def test_pictures_show_all_ways() -> None:
    silent: Agreement = summarise([RankCounts(Sent(), [1.0]), RankCounts(Sent(), [1.0])], steps=1)
    way = summarise([COORDINATOR, MEMBER], steps=4)
    messages, times = panels([Result(2, 1, {"planned": silent, "negotiated": way})])
    assert list(messages.series) == [
        "planned, mean: none",
        "planned, coordinator: none",
        "negotiated, mean",
        "negotiated, coordinator",
    ]
    assert set(times.series) == {"planned", "negotiated"}
