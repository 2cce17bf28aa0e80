"""The recorder and its files: bounded, valid JSON after every write, and merged, whole or cut at any byte."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.observe.timelines import write

from hvlike.__main__ import main
from hvlike.errors import UsageError
from hvlike.observe.recorder import PENDING_EVENTS, Recorder, TraceFile, check_writable, path_of_rank
from hvlike.observe.timelines import merge, read

FIRST = {"ph": "M", "name": "first"}
LAST = {"ph": "i", "name": "last"}


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def names(path: Path) -> list[str]:
    return [event["name"] for event in events(path)]


def test_it_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), {"rank": 3}, FIRST, 10_000)
    expected = ["first"]
    assert names(path) == expected
    for number in range(20):
        events = [{"ph": "i", "name": f"{number} {index}" + '\n"]}'} for index in range(number % 4)]
        assert file.write(events, LAST)
        expected += [event["name"] for event in events]
        assert names(path) == expected
    file.close()
    assert json.loads(path.read_text())["otherData"] == {"rank": 3}


def test_an_older_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("x" * 5000)
    TraceFile(str(path), {}, FIRST, 10_000).close()
    assert names(path) == ["first"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), {}, FIRST, 10_000)
    file.write([{"ph": "i", "name": "before"}], LAST)
    write, calls = os.pwrite, []

    def half(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(len(data))
        return write(descriptor, data[: len(data) // 2] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="bytes written"):
        file.write([{"ph": "i", "name": "lost", "args": "x" * 500}], LAST)
    monkeypatch.undo()
    assert names(path) == ["first", "before"]
    assert file.write([{"ph": "i", "name": "after"}], LAST)
    assert names(path) == ["first", "before", "after"]


@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("a/timeline.json", 0, "a/timeline.json"),
        ("a/timeline.json", 12, "a/timeline.rank12.json"),
        ("plain", 1, "plain.rank1"),
        ("a.b/t.x.json", 1, "a.b/t.x.rank1.json"),
    ],
)
def test_every_rank_has_a_file_of_its_own(path: str, rank: int, expected: str) -> None:
    assert path_of_rank(path, rank) == expected


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = ({}, FIRST, 1000)
    with pytest.raises(UsageError, match=f"{tmp_path} cannot be written: {os.strerror(errno.EISDIR)}"):
        TraceFile(str(tmp_path), *arguments)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        check_writable(str(tmp_path / "none" / "t.json"), 1)
    path = tmp_path / "t.rank1.json"
    path.write_text("kept")
    check_writable(str(tmp_path / "t.json"), 1)
    assert path.read_text() == "kept"


def recorder(path: Path | None = None, rank: int = 0, max_bytes: int = 10_000) -> Recorder:
    """One that records into a file, if there is a path."""
    made = Recorder(rank, 4, "here", 0)
    if path is not None:
        begin(made, path, max_bytes)
    return made


def begin(off: Recorder, path: Path, max_bytes: int = 10_000) -> None:
    off.start(str(path), mark_cycles=False, max_bytes=max_bytes)


def test_nothing_is_kept_while_it_is_off(tmp_path: Path) -> None:
    off = recorder()
    assert not off.on
    off.instant(1, "unseen")
    off.flush()
    off.stop()
    path = tmp_path / "t.json"
    begin(off, path)
    off.stop()
    off.instant(1, "unseen")
    assert "unseen" not in path.read_text()


def test_events_of_all_threads_are_there_and_in_order_in_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    on = recorder(path, rank=2, max_bytes=10_000_000)

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
        begin(on, tmp_path / name)
        with pytest.raises(UsageError, match=f"rank 0 records a timeline into .*{name} already"):
            begin(on, tmp_path / "c.json")
        on.row(name)
        on.stop()
        on.stop()
    assert not (tmp_path / "c.json").exists()
    assert "b.json" not in (tmp_path / "a.json").read_text()


def test_a_file_that_cannot_be_begun_leaves_it_off(tmp_path: Path) -> None:
    off = recorder()
    with pytest.raises(UsageError, match="cannot be written"):
        begin(off, tmp_path / "no" / "t.json")
    assert not off.on
    begin(off, tmp_path / "t.json")
    off.stop()


def test_it_ends_by_itself_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    on = recorder(path, max_bytes=5000)
    for _ in range(200):
        on.instant(1, "more")
        on.flush()
    assert not on.on
    assert names(path)[-2:] == ["more", "TIMELINE_FULL"]
    assert path.stat().st_size < 5200
    begin(on, tmp_path / "next.json")
    on.stop()


WORK = [("a row", "work", 0.0, 1.0, {"text": 'quotes " and ]}\n'})]


def test_all_events_are_there_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    paths = write(tmp_path, [WORK] * 3)
    merged = merge([paths[2], paths[0], paths[1]])
    assert [each["rank"] for each in merged["otherData"]["ranks"]] == [0, 1, 2]
    ranks = [event["pid"] for event in merged["traceEvents"]]
    assert ranks == sorted(ranks)
    assert len(ranks) == sum(len(json.loads(path.read_text())["traceEvents"]) for path in paths)


def test_of_a_cut_file_every_whole_event_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, [WORK] * 2)[1]
    whole = path.read_text()
    expected = json.loads(whole)["traceEvents"]
    head = whole.index("\n")
    cut = tmp_path / "cut.json"
    for length in range(head, len(whole)):
        cut.write_text(whole[:length])
        found = read(cut)["traceEvents"]
        assert found == expected[: len(found)]
        assert len(found) >= whole[:length].count("},\n") - 1
    assert found == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", "no", '{"traceEvents":[]}', '{"traceEvents": [], "otherData": {}}'])
def test_what_is_no_timeline_of_a_rank_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"other\.json is not the timeline of a rank"):
        read(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = list(map(str, write(tmp_path, [WORK] * 2)))
    out = str(tmp_path / "all.json")
    assert main(["timeline", "merge", out, *paths]) == 0
    assert "events of 2 ranks" in capsys.readouterr().out
    assert {event["pid"] for event in json.loads(Path(out).read_text())["traceEvents"]} == {0, 1}
    assert main(["timeline", "merge", *paths]) == 1
    assert f"{paths[0]} exists already" in capsys.readouterr().err
    assert main(["timeline", "merge", "--force", out, str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
