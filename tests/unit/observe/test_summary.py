"""timeline summary: tables of files of ranks or of a merged one, and a picture."""

import json
from pathlib import Path

import pytest
from support.observe.timelines import bucket, traces, wait, write

from hvlike.__main__ import main
from hvlike.observe.pictures import steps_figure
from hvlike.observe.timelines import trainings

FIRST = [wait(0, 0, 10), wait(1, 30, 40), bucket(25, 40), wait(2, 60, 61)]
SECOND = [wait(0, 5, 10), wait(1, 33, 40), bucket(33, 40), wait(2, 50, 61)]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["timeline", "summary", *arguments]) == 0
    return capsys.readouterr().out


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in write(tmp_path, [FIRST, SECOND])]
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
    paths = [str(path) for path in write(tmp_path, [FIRST, SECOND, SECOND])]
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


def test_a_cut_file_counts_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, [FIRST])[0]
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"step": 2')])
    assert "1 steps of one" in said([str(path)], capsys)


def test_nothing_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, [[]])[0])
    assert "neither steps, nor named operations" in said([path], capsys)
    pytest.importorskip("matplotlib")
    assert main(["timeline", "summary", path, "--plot", str(tmp_path / "p.png")]) == 1
    assert "no picture" in capsys.readouterr().err


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in write(tmp_path, [FIRST, SECOND])]
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


@pytest.mark.parametrize("ranks", [2, 10])
def test_the_picture_is_a_png(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    paths = [str(path) for path in write(tmp_path, [FIRST, SECOND] * (ranks // 2))]
    picture = tmp_path / "steps.png"
    assert f"{picture}: the steps of one" in said([*paths, "--plot", str(picture)], capsys)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
