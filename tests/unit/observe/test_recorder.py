"""The recorder: from any thread, with bounded memory, started and stopped at any time, and nothing while it is off."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hvlike.errors import UsageError
from hvlike.observe.recorder import PENDING_EVENTS, Recorder


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def recorder(rank: int = 0) -> Recorder:
    return Recorder(rank, 4, "here", 0)


def test_nothing_is_kept_while_it_is_off(tmp_path: Path) -> None:
    off = recorder()
    assert not off.on
    off.instant(1, "unseen")
    off.flush()
    off.stop()
    path = tmp_path / "t.json"
    off.start(str(path), mark_cycles=False, max_bytes=10_000)
    off.stop()
    off.instant(1, "unseen")
    assert "unseen" not in path.read_text()


def test_events_of_all_threads_are_there_and_in_order_in_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    on = recorder(2)
    on.start(str(path), mark_cycles=False, max_bytes=10_000_000)

    def work(number: int) -> None:
        row = on.row(f"thread {number}")
        for index in range(PENDING_EVENTS):
            on.instant(row, f"{number}.{index}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Only what came last is still in memory.
    assert len(events(tmp_path / "t.rank2.json")) > 2 * PENDING_EVENTS
    on.stop()
    found = events(tmp_path / "t.rank2.json")
    titles = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert sorted(titles.values()) == ["thread 0", "thread 1", "thread 2"]
    for row, title in titles.items():
        seen = [each["name"] for each in found if each["ph"] == "i" and each["tid"] == row]
        assert seen == [f"{title[-1]}.{index}" for index in range(PENDING_EVENTS)]
    assert {each["pid"] for each in found} == {2}
    assert not path.exists()


def test_two_starts_are_refused_and_a_start_after_a_stop_is_not(tmp_path: Path) -> None:
    on = recorder()
    for name in ("a.json", "b.json"):
        on.start(str(tmp_path / name), mark_cycles=False, max_bytes=10_000)
        with pytest.raises(UsageError, match=f"rank 0 records a timeline into .*{name} already"):
            on.start(str(tmp_path / "c.json"), mark_cycles=False, max_bytes=10_000)
        on.row(name)
        on.stop()
        on.stop()
    assert not (tmp_path / "c.json").exists()
    assert "b.json" not in (tmp_path / "a.json").read_text()


def test_a_file_that_cannot_be_begun_leaves_it_off(tmp_path: Path) -> None:
    off = recorder()
    with pytest.raises(UsageError, match="cannot be written"):
        off.start(str(tmp_path / "no" / "t.json"), mark_cycles=False, max_bytes=10_000)
    assert not off.on
    off.start(str(tmp_path / "t.json"), mark_cycles=False, max_bytes=10_000)
    off.stop()


def test_it_ends_by_itself_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    on = recorder()
    on.start(str(path), mark_cycles=False, max_bytes=5000)
    for _ in range(200):
        on.instant(1, "more")
        on.flush()
    assert not on.on
    assert events(path)[-1]["name"] == "TIMELINE_FULL"
    assert path.stat().st_size < 5200
    on.start(str(tmp_path / "next.json"), mark_cycles=False, max_bytes=5000)
    on.stop()
