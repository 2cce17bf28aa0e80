"""Timelines: files of ranks, valid after every write and merged, whole or cut; what the summary makes of the steps."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.observe.timelines import LANE, bucket, traces, wait, write

from hvlike.__main__ import main
from hvlike.errors import UsageError
from hvlike.observe.pictures import steps_figure
from hvlike.observe.recorder import PENDING_EVENTS, Recorder, TraceFile, check_writable, path_of_rank
from hvlike.observe.timelines import (
    Parts,
    calls,
    common,
    length,
    merge,
    operations,
    rank_traces,
    read,
    trainings,
    union,
)

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
    for end in range(head, len(whole)):
        cut.write_text(whole[:end])
        found = read(cut)["traceEvents"]
        assert found == expected[: len(found)]
        assert len(found) >= whole[:end].count("},\n") - 1
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


def test_intervals_are_joined_and_cut() -> None:
    joined = union([(5, 6), (0, 2), (1, 3), (3, 4), (5.5, 5.6)])
    assert joined == [(0, 4), (5, 6)]
    assert common(joined, [(1, 5.25), (5.75, 9)]) == [(1, 4), (5, 5.25), (5.75, 6)]
    assert common(joined, []) == []
    assert length(joined) == 5


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    #          0    10         30  33    40 ms
    #  rank 0  |wait| compute     |w       |   here at 30, others come at 33
    #  rank 1       | compute          |w  |   here at 33
    first = [wait(0, 0, 10), wait(1, 30, 40), bucket(25, 40)]
    second = [wait(0, 5, 10), wait(1, 33, 40), bucket(33, 40)]
    (training,) = trainings(traces(tmp_path, first, second))
    assert training.name == "one"
    one, other = training.ranks
    # The bucket of rank 0 began 5 ms before it waited.
    assert one.steps == {(0, 1): pytest.approx(Parts(30, 20, 3, 7, 5))}
    assert other.steps == {(0, 1): pytest.approx(Parts(30, 23, 0, 7, 0))}
    assert (one.host, other.host) == ("host0", "host1")
    assert training.last_to_come == {1: 1}


def test_waits_of_other_rows_are_no_compute_and_one_rank_alone_waits_for_nobody(tmp_path: Path) -> None:
    # ZeRO, say, waits for gradients and then for parameters.
    phases = [wait(0, 0, 1), wait(1, 10, 14), wait(1, 6, 8, row="step of two")]
    found = trainings(traces(tmp_path, phases))
    assert [each.name for each in found] == ["one"]  # of the other one wait is no step
    assert found[0].ranks[0].steps[0, 1] == pytest.approx(Parts(13, 7, 0, 6, 0))
    assert not found[0].last_to_come


def test_numbers_that_begin_anew_are_other_steps(tmp_path: Path) -> None:
    phases = [wait(step, at, at + 1) for at, step in ((0, 0), (10, 1), (20, 0), (30, 1))]
    (training,) = trainings(traces(tmp_path, phases))
    assert sorted(training.ranks[0].steps) == [(0, 1), (1, 0), (1, 1)]


def test_steps_of_two_process_sets_are_two_trainings(tmp_path: Path) -> None:
    def of(number: int) -> list[tuple[str, str, float, float, dict[str, int]]]:
        return [("step of one", "WAIT", at, at + 1, {"step": at, "process_set": number}) for at in (0, 5)]

    found = trainings(traces(tmp_path, of(1), of(2)))
    assert sorted((each.process_set, len(each.ranks)) for each in found) == [(1, 1), (2, 1)]


def test_what_did_not_end_is_left_out() -> None:
    begun = {"ph": "B", "pid": 0, "tid": 1, "ts": 5.0, "name": "WAIT", "args": {"step": 0}}
    trace = {"otherData": {"rank": 0}, "traceEvents": [{"ph": "E", "pid": 0, "tid": 1, "ts": 1.0}, begun]}
    assert rank_traces([trace])[0].rows == {}


def test_named_operations_and_calls_by_kind(tmp_path: Path) -> None:
    row = "allreduce.loss"
    phases = [
        (row, "NEGOTIATE_ALLREDUCE", 0.0, 4.0, {"bytes": 400}),
        (row, "QUEUE", 4.0, 5.0, {}),
        (row, "ALLREDUCE", 5.0, 7.0, {"fused": 1}),
        (LANE, "ALLREDUCE", 5.0, 7.0, {"bytes": 400}),
        ("rpc calls 1", "f", 0.0, 8.0, {"function": "f"}),
        ("rpc serves 1", "RUN", 1.0, 2.0, {"function": "g"}),
    ]
    (found,) = operations(traces(tmp_path, phases, phases))
    assert (found.kind, found.count, found.bytes) == ("allreduce", 2, 800)
    assert (found.agreement, found.queue, found.execution, found.longest_agreement) == (4.0, 1.0, 2.0, 4.0)
    (called, served) = calls(traces(tmp_path, phases))
    assert (called.what, called.function, called.count, called.mean, called.longest) == ("call", "f", 1, 8.0, 8.0)
    assert (served.what, served.function, served.mean) == ("run", "g", 1.0)


EARLY = [wait(0, 0, 10), wait(1, 30, 40), bucket(25, 40), wait(2, 60, 61)]
LATE = [wait(0, 5, 10), wait(1, 33, 40), bucket(33, 40), wait(2, 50, 61)]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["timeline", "summary", *arguments]) == 0
    return capsys.readouterr().out


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [*map(str, write(tmp_path, [EARLY, LATE]))]
    text = said(paths, capsys)
    lines = [line.split() for line in text.splitlines()]
    assert "2 steps of one" in text
    assert ["0", "host0", "25.50", "20.00", "1.50", "4.00", "2.50"] in lines
    assert ["1", "host1", "25.50", "16.50", "5.00", "4.00", "0.00"] in lines
    assert "last to come: rank 1, in 1 of 2 steps" in text or "last to come: rank 0, in 1 of 2 steps" in text
    assert "longest step: number 1 on rank 1, 30.00 ms: compute 23.00, others 0.00, reduction 7.00" in text
    merged = str(tmp_path / "all.json")
    assert main(["timeline", "merge", merged, *paths]) == 0
    capsys.readouterr()
    assert said([merged], capsys) == text
    assert said(paths[::-1], capsys) == text


def test_the_files_beside_that_of_one_rank_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [*map(str, write(tmp_path, [EARLY, LATE, LATE]))]
    text = said(paths, capsys)
    assert said(paths[:1], capsys) == text
    assert said(paths[2:], capsys) == text
    merged = str(tmp_path / "all.json")
    assert main(["timeline", "merge", merged, paths[1]]) == 0
    assert "of 3 ranks" in capsys.readouterr().out
    assert said([merged], capsys) == text


def test_of_another_job_nothing_is_taken_and_who_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [EARLY, LATE])
    (tmp_path / "new").mkdir()
    first, second, _ = write(tmp_path / "new", [EARLY, LATE, LATE])
    first.rename(tmp_path / first.name)
    (tmp_path / second.name).write_text("cut off before its head")
    assert main(["timeline", "summary", str(tmp_path / first.name)]) == 0
    told = capsys.readouterr()
    assert "host1" not in told.out
    assert "Missing, of 3 ranks: the timelines of 1, 2." in told.err


def test_nothing_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, [[]])[0])
    assert "neither steps, nor named operations" in said([path], capsys)
    pytest.importorskip("matplotlib")
    assert main(["timeline", "summary", path, "--plot", str(tmp_path / "p.png")]) == 1
    assert "no picture" in capsys.readouterr().err


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [*map(str, write(tmp_path, [EARLY, LATE]))]
    merged = tmp_path / "all.json"
    assert main(["timeline", "merge", str(merged), *paths]) == 0
    assert main(["timeline", "summary", str(merged), paths[1]]) == 1
    assert "rank 1 is in" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"traceEvents": []}))
    assert main(["timeline", "summary", str(other)]) == 1
    assert "is not the timeline of a rank" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 10])
def test_each_colour_of_the_picture_means_one_thing(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    figure = steps_figure(trainings(traces(tmp_path, *[EARLY, LATE] * (ranks // 2)))[0])
    means, times = figure.axes
    bars = {to_hex(patch.get_facecolor()): each.get_label() for each in means.containers for patch in each}
    assert len(bars) == len(means.containers)
    lines = {to_hex(line.get_color()) for line in times.lines}
    assert len(lines) == (ranks if ranks == 2 else 1)
    assert not lines & set(bars)
    if ranks == 2:
        assert {to_hex(label.get_color()) for label in means.get_yticklabels()} == lines


def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    paths = [*map(str, write(tmp_path, [EARLY, LATE]))]
    picture = tmp_path / "steps.png"
    assert f"{picture}: the steps of one" in said([*paths, "--plot", str(picture)], capsys)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
