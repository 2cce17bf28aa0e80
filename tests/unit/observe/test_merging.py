"""timeline merge: one file of the files of all ranks, whole or cut at any byte."""

import json
from pathlib import Path

import pytest

from hvlike.__main__ import main
from hvlike.errors import UsageError
from hvlike.observe.recorder import Recorder
from hvlike.observe.timelines import merge, read


def write(folder: Path, rank: int) -> Path:
    recorder = Recorder(rank, 3, "here", 0)
    recorder.start(str(folder / "t.json"), mark_cycles=False, max_bytes=100_000)
    row = recorder.row("a row")
    recorder.begin(row, "work", {"text": 'quotes " and ]}\n'})
    recorder.end(row)
    recorder.stop()
    return folder / ("t.json" if rank == 0 else f"t.rank{rank}.json")


def test_all_events_are_there_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    paths = [write(tmp_path, rank) for rank in (2, 0, 1)]
    merged = merge(paths)
    assert [each["rank"] for each in merged["otherData"]["ranks"]] == [0, 1, 2]
    ranks = [event["pid"] for event in merged["traceEvents"]]
    assert ranks == sorted(ranks)
    assert len(ranks) == sum(len(json.loads(path.read_text())["traceEvents"]) for path in paths)


def test_of_a_cut_file_every_whole_event_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
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


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    with pytest.raises(UsageError, match=r"rank 1 is in .*: leave one of them out"):
        merge([path, path])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write(tmp_path, rank)) for rank in range(2)]
    out = str(tmp_path / "all.json")
    assert main(["timeline", "merge", out, *paths]) == 0
    assert "events of 2 ranks" in capsys.readouterr().out
    assert {event["pid"] for event in json.loads(Path(out).read_text())["traceEvents"]} == {0, 1}
    assert main(["timeline", "merge", *paths]) == 1
    assert f"{paths[0]} exists already" in capsys.readouterr().err
    assert main(["timeline", "merge", "--force", out, str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
