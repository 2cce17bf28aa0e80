"""bench waiting: ratios are taken within a repetition, and tables and pictures show all of them."""

import pytest
from support.bench.some_conditions import CONDITIONS

from benchmarks.waiting import AGAIN, FREE, NAMED, NOTHING, PLANNED, as_json, as_text, panels, ratios, repeated, works

SECONDS = {NOTHING: [1.0, 2.0], AGAIN: [1.0, 2.0], NAMED: [1.5, 2.0], PLANNED: [2.0, 4.0]}
FOUND = {FREE: {"slowdown": {"matmul": ratios(SECONDS)}, "latency": {"matmul": [1e-4, 3e-4, 2e-4]}}}


def test_ratios_pair_what_was_measured_together() -> None:
    assert ratios(SECONDS) == {AGAIN: [1.0, 1.0], NAMED: [1.5, 1.0], PLANNED: [2.0, 2.0]}


def test_reports_show_every_wait_and_place() -> None:
    text = as_text({**CONDITIONS, "switch_interval": 0.005}, FOUND)
    assert "1.250 [1.125, 1.375]" in text
    assert "2.000 [2.000, 2.000]" in text
    assert "200 us" in text
    found = as_json(FOUND)[FREE]
    assert found["slowdown"]["matmul"][NAMED]["samples"] == [1.5, 1.0]
    assert found["latency"]["matmul"]["median"] == pytest.approx(2e-4)
    (panel,) = panels(FOUND)
    assert panel.heights == {AGAIN: [1.0], NAMED: [1.25], PLANNED: [2.0]}


def test_work_is_repeated_to_take_the_time_it_shall() -> None:
    calls = []
    run = repeated(lambda: calls.append(0), 0.001)
    calls.clear()
    run()
    assert len(calls) > 1
    assert len(works()) == 4
