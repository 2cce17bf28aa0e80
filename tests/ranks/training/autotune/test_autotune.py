"""HVLIKE_AUTOTUNE=1: training gives the same bits, all ranks use the same sizes, and what was found stays."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike.training.autotune import BUCKET_BYTES, COLUMNS, ROUNDS, WARMUP_SAMPLES

STEPS, SAMPLES = 2, ROUNDS * (1 + len(BUCKET_BYTES))
ENOUGH = (STEPS + 1) * (WARMUP_SAMPLES + SAMPLES) + 2


@pytest.fixture
def knobs(hvd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Start hvlike again with some knobs; with none after the test."""

    def start(**values: object) -> None:
        hvd.shutdown()
        for name, value in values.items():
            monkeypatch.setenv(f"HVLIKE_{name}", str(value))
        hvd.init()

    yield start
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Path:
    """Rank 0's temporary folder, on every rank."""
    return Path(hvd.broadcast_object(str(tmp_path), 0))


def tuning(folder: Path) -> dict[str, object]:
    return {
        "AUTOTUNE": 1,
        "BUCKET_BYTES": 256,
        "AUTOTUNE_LOG": folder / "log.csv",
        "AUTOTUNE_STEPS_PER_SAMPLE": STEPS,
    }


def train(hvd: ModuleType, model: nn.Module, steps: int = ENOUGH) -> torch.optim.Optimizer:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()
    return optimizer


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_tuned_run_gives_the_bits_of_an_untuned_one(
    hvd: ModuleType, knobs: Callable[..., None], folder: Path, overlap: int
) -> None:
    plain, tuned = make_model(), make_model()
    # Far below the gradients' size, so that a change changes the buckets.
    knobs(OVERLAP=overlap, BUCKET_BYTES=256)
    train(hvd, plain)
    knobs(**tuning(folder))
    optimizer = train(hvd, tuned)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), tuned.parameters(), strict=True))
    assert same_on_all_ranks(tuned.parameters())
    assert optimizer.gradients.reducers.tuner.finished


@pytest.mark.mpi(min_size=2)
def test_every_sample_is_logged_and_the_fastest_sizes_stay(
    hvd: ModuleType, knobs: Callable[..., None], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    knobs(**tuning(folder))
    optimizer = train(hvd, make_model())
    sizes = optimizer.gradients.reducers.current.proposal.sizes
    said = f"hvlike autotune: HVLIKE_BUCKET_BYTES={sizes.bucket_bytes} HVLIKE_FIRST_BUCKET_BYTES="
    assert (said in capfd.readouterr().err) == (hvd.rank() == 0)
    assert hvd.allgather_object(sizes) == [sizes] * hvd.size()
    header, *rows = (line.split(",") for line in (folder / "log.csv").read_text().splitlines())
    assert header == list(COLUMNS)
    expected = [[str(number), str(int(number <= WARMUP_SAMPLES))] for number in range(1, WARMUP_SAMPLES + SAMPLES + 1)]
    assert [row[:2] for row in rows] == expected
    seconds: dict[str, float] = {}
    for row in rows[WARMUP_SAMPLES:]:
        seconds[row[2]] = seconds.get(row[2], 0.0) + float(row[-1])
    assert len(seconds) == SAMPLES / ROUNDS
    assert str(sizes.bucket_bytes) == min(seconds, key=seconds.__getitem__)


@pytest.mark.mpi(min_size=2)
def test_the_parameters_may_change_in_the_middle_of_a_search(
    hvd: ModuleType, knobs: Callable[..., None], folder: Path
) -> None:
    knobs(**tuning(folder))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(2 * ENOUGH):
        next(model.parameters()).requires_grad_(step % 7 != 3)
        optimizer.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        optimizer.step()
    tuner = optimizer.gradients.reducers.tuner
    assert tuner.finished
    assert optimizer.gradients.reducers.current.proposal.sizes == tuner.sizes
    assert same_on_all_ranks(model.parameters())


@pytest.mark.mpi(min_size=2)
def test_the_first_optimizer_of_several_is_tuned(hvd: ModuleType, knobs: Callable[..., None], folder: Path) -> None:
    knobs(**tuning(folder))
    first, second = train(hvd, make_model()), train(hvd, make_model(1))
    assert first.gradients.reducers.tuner.finished
    assert second.gradients.reducers.tuner is None


@pytest.mark.mpi(min_size=2)
def test_a_search_outlives_a_join(hvd: ModuleType, knobs: Callable[..., None], folder: Path) -> None:
    knobs(**tuning(folder))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    for epoch in range(4):
        for step in range(ENOUGH // 3 + (epoch + hvd.rank()) % hvd.size()):
            optimizer.zero_grad()
            loss_of(model, share(hvd, whole_batch(step))).backward()
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    samples = len((folder / "log.csv").read_text().splitlines()) - 1
    assert samples > WARMUP_SAMPLES
    assert (
        hvd.allgather_object(optimizer.gradients.reducers.tuner.sizes)
        == [optimizer.gradients.reducers.tuner.sizes] * hvd.size()
    )


def test_nothing_is_tuned_unless_asked_for(hvd: ModuleType) -> None:
    assert train(hvd, make_model(), steps=2).gradients.reducers.tuner is None


@pytest.mark.mpi(min_size=2)
def test_the_knobs_choose_the_buckets(hvd: ModuleType, knobs: Callable[..., None]) -> None:
    knobs(BUCKET_BYTES=600, FIRST_BUCKET_BYTES=40)
    optimizer = train(hvd, make_model(), steps=2)
    plan = optimizer.gradients.reducers.current.schedule.plan
    sizes = [parameter.numel() * 4 for parameter in optimizer.param_groups[0]["params"]]
    filled = [sum(sizes[index] for index in bucket) for bucket in plan.buckets]
    assert len(plan.buckets) > 2
    assert filled[0] <= 40
    assert all(total <= 600 or len(bucket) == 1 for total, bucket in zip(filled, plan.buckets, strict=True))
