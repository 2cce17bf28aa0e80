"""A trace file is valid JSON after every write, ends at its limit, and survives a disk that is full."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvlike.errors import UsageError
from hvlike.observe.recorder import TraceFile, check_writable, path_of_rank

FIRST = {"ph": "M", "name": "first"}
LAST = {"ph": "i", "name": "last"}


def names(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


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


def test_it_ends_at_its_limit_with_an_event_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), {}, FIRST, 1000)
    while file.write([{"ph": "i", "name": "more"}] * 5, LAST):
        assert path.stat().st_size <= 1000
    found = names(path)
    assert found[-1] == "last"
    assert found[-2] == "more"
    assert path.stat().st_size < 1000 + 100


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
