"""A step's time is parted exactly, nothing is counted twice; timeline summary shows it in tables and a picture."""

import json
from pathlib import Path

import pytest
from support.observe.timelines import LANE, bucket, traces, wait, write

from hvlike.__main__ import main
from hvlike.observe.pictures import steps_figure
from hvlike.observe.timelines import Parts, calls, common, length, operations, rank_traces, trainings, union


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


FIRST = [wait(0, 0, 10), wait(1, 30, 40), bucket(25, 40), wait(2, 60, 61)]
SECOND = [wait(0, 5, 10), wait(1, 33, 40), bucket(33, 40), wait(2, 50, 61)]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["timeline", "summary", *arguments]) == 0
    return capsys.readouterr().out


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [*map(str, write(tmp_path, [FIRST, SECOND]))]
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
    paths = [*map(str, write(tmp_path, [FIRST, SECOND, SECOND]))]
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
    write(tmp_path, [FIRST, SECOND])
    (tmp_path / "new").mkdir()
    first, second, _ = write(tmp_path / "new", [FIRST, SECOND, SECOND])
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
    paths = [*map(str, write(tmp_path, [FIRST, SECOND]))]
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

    figure = steps_figure(trainings(traces(tmp_path, *[FIRST, SECOND] * (ranks // 2)))[0])
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
    paths = [*map(str, write(tmp_path, [FIRST, SECOND]))]
    picture = tmp_path / "steps.png"
    assert f"{picture}: the steps of one" in said([*paths, "--plot", str(picture)], capsys)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
