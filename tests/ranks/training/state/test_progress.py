"""hvd.progress: one bar, shown by rank 0 where somebody sees it; means over all ranks, whatever each of them does."""

import logging
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from hvlike.errors import UsageError
from hvlike.observe.counters import Means
from hvlike.training import progress as module

PATIENCE_SECONDS = 60


@pytest.mark.pure
def test_means_are_those_of_all_values_that_have_come() -> None:
    means, part = Means(), Means()
    part.add({"loss": (6.0, 2)})
    means.add(part.take())
    means.add({"loss": (0.0, 1), "accuracy": (0.5, 1)})
    assert means.means() == {"loss": 2.0, "accuracy": 0.5}
    assert part.take() == {}


def wait_for(bar: Any, expected: dict[str, float]) -> None:
    """Messages of other ranks are on their way."""
    end = time.monotonic() + PATIENCE_SECONDS
    while bar.metrics != expected and time.monotonic() < end:
        time.sleep(0.01)
    assert bar.metrics == expected


def test_figures_are_averaged_over_ranks_with_different_numbers_of_steps(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    bar = hvd.progress(range(rank + 1), "uneven")
    seen = []
    for step in bar:
        seen.append(step)
        bar.set_metrics(loss=torch.tensor(float(rank), requires_grad=True), one=1)
    assert seen == list(range(rank + 1))
    assert len(bar) == rank + 1
    if rank == 0:
        total = sum(each * (each + 1) for each in range(size))
        wait_for(bar, {"loss": total / (size * (size + 1) / 2), "one": 1.0})
    else:
        assert bar.metrics == {"loss": rank, "one": 1.0}
    hvd.barrier()


def test_bars_of_one_name_are_matched_by_their_order(hvd: ModuleType) -> None:
    if hvd.rank() == 0:
        hvd.progress(desc="of rank 0 alone").set_metrics(loss=100.0)
    for turn in range(2):
        with hvd.progress(desc="twice") as bar:
            bar.set_metrics(turn=turn)
        if hvd.rank() == 0:
            wait_for(bar, {"turn": turn})
    hvd.barrier()


class Seen:
    """Stands for the class tqdm: what it was told."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.updates = 0
        self.postfix: dict[str, float] = {}
        self.lines: list[str] = []
        self.closed = 0

    def update(self, n: int) -> None:
        self.updates += n

    def set_postfix(self, values: dict[str, float], refresh: bool) -> None:
        self.postfix = values

    def write(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        self.closed += 1


class Package:
    """Stands for the package tqdm."""

    def __init__(self) -> None:
        self.bars: list[Seen] = []

    def tqdm(self, **options: Any) -> Seen:
        self.bars.append(Seen(**options))
        return self.bars[-1]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    double = Package()
    monkeypatch.setattr(module, "import_module", lambda name: double)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "columns_of_terminal", lambda: 99)
    return double


def test_rank_0_alone_shows_a_bar(hvd: ModuleType, package: Package) -> None:
    bar = hvd.progress([1, 2, 3], "shown", unit="batch")
    for each in bar:
        assert bar.shown == (hvd.rank() == 0)
        bar.set_metrics(value=each)
        bar.write(f"line {each}")
    assert len(package.bars) == (hvd.rank() == 0)
    for seen in package.bars:
        assert seen.options == {"desc": "shown", "total": 3, "ncols": 99, "unit": "batch"}
        assert (seen.updates, seen.closed) == (3, 1)
        assert seen.lines == ["line 1", "line 2", "line 3"]
        assert 1 <= seen.postfix["value"] <= 3
    hvd.barrier()


def test_leaving_the_loop_early_closes_the_bar(hvd: ModuleType, package: Package) -> None:
    for each in hvd.progress(range(3)):
        if each == 1:
            break
    assert [seen.closed for seen in package.bars] == [1] * (hvd.rank() == 0)
    assert [seen.updates for seen in package.bars] == [1] * (hvd.rank() == 0)


@pytest.mark.parametrize(
    ("columns", "disable", "shown"), [(None, None, 0), (None, False, 1), (80, True, 0), (80, None, 1)]
)
def test_it_is_quiet_where_nobody_looks(
    columns: int | None,
    disable: bool | None,
    shown: int,
    hvd: ModuleType,
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "columns_of_terminal", lambda: columns)
    bar = hvd.progress(total=2, disable=disable)
    bar.update()
    bar.write("a line")
    bar.close()
    assert len(package.bars) == (shown if hvd.rank() == 0 else 0)
    assert capsys.readouterr().out == ("a line\n" if hvd.rank() == 0 and not shown else "")


class Hostile:
    """A stream of the program's own that fails at everything."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)


@pytest.mark.parametrize("disable", [None, False])
def test_a_stream_that_fails_ends_no_loop(
    disable: bool | None, hvd: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Hostile())
    bar = hvd.progress(range(5), disable=disable, mininterval=0)
    seen = []
    for each in bar:
        seen.append(each)
        bar.set_metrics(value=each)
        bar.write("a line")
    assert seen == [0, 1, 2, 3, 4]
    hvd.barrier()


def test_a_bar_that_fails_is_gone_and_the_loop_goes_on(
    hvd: ModuleType, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bar: Seen, n: int) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(Seen, "update", fail)
    bar = hvd.progress(range(5))
    assert list(bar) == [0, 1, 2, 3, 4]
    assert not bar.shown
    hvd.barrier()


def test_without_tqdm_the_loop_runs_and_the_log_says_why_there_is_no_bar(
    hvd: ModuleType, package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="hvlike"):
        assert list(hvd.progress(range(3))) == [0, 1, 2]
    assert ("pip install tqdm" in caplog.text) == (hvd.rank() == 0)
    assert not package.bars


def test_wrong_arguments_are_refused(hvd: ModuleType) -> None:
    with pytest.raises(UsageError, match="something to iterate over, got int"):
        hvd.progress(3)
    bar = hvd.progress()
    with pytest.raises(UsageError, match=r"loss is a tensor of shape \(2,\), expected one element"):
        bar.set_metrics(loss=torch.ones(2))
