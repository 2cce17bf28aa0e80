"""Compressors through failed steps, changed parameters, process sets and overlap; and where they do not belong."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training.compressed import Run
from support.training.problem import same_on_all_ranks
from torch import Tensor

from hvlike.collectives.api.gather_scatter import allgather
from hvlike.collectives.compression import Compressor, Exchange, PowerSGD, StatefulCompressor, TopK
from hvlike.errors import HorovodInternalError, MismatchError, UsageError
from hvlike.transport.loop.coroutine import Coroutine

SHAPES = [(20, 30), (6,), (12, 20)]


class Breaking(PowerSGD):
    """Breaks in the middle of a step, or after its last exchange."""

    breaks = ""

    def _orthonormalise(self, works: Any, exchange: Exchange) -> Coroutine[None]:
        if self.breaks == "middle":
            raise HorovodInternalError("broken in the middle")
        yield from super()._orthonormalise(works, exchange)

    def _end(self, work: Any) -> None:
        super()._end(work)
        if self.breaks == "end":
            raise HorovodInternalError("broken at the end")


def breaking() -> Breaking:
    return Breaking(start_powerSGD_iter=1)


@pytest.mark.mpi(min_size=2)
def test_a_failed_step_leaves_the_memory_as_it_was(hvd: ModuleType) -> None:
    run = Run(hvd, breaking(), SHAPES)
    for step in range(3):
        run.step(step)
    before, mark = run.errors(), run.compression.mark()
    for place in ("middle", "end"):
        run.compression.breaks = place
        with pytest.raises(HorovodInternalError, match="broken"):
            run.step(3)
        assert run.errors().keys() == before.keys()
        assert all(torch.equal(error, before[name]) for name, error in run.errors().items())
        assert run.compression.mark() == mark
    run.compression.breaks = ""
    # As if nothing had happened.
    reference = Run(hvd, breaking(), SHAPES)
    for step in range(3):
        reference.step(step)
    for one, other in zip(run.step(3), reference.step(3), strict=True):
        assert torch.equal(one, other)


@pytest.mark.mpi(min_size=2)
def test_ranks_go_on_together_after_a_step_that_failed_on_one(hvd: ModuleType) -> None:
    run = Run(hvd, breaking(), SHAPES)
    for step in range(3):
        run.step(step)
    run.compression.breaks = "end" if hvd.rank() == 0 else ""
    if hvd.rank() == 0:
        with pytest.raises(HorovodInternalError, match="broken"):
            run.step(3)
    else:
        run.step(3)
    run.compression.breaks = ""
    with pytest.raises(HorovodInternalError, match="no rank can go on"):
        run.step(4)
    for step in (5, 6):
        assert same_on_all_ranks(run.step(step))
    assert bool((allgather(torch.tensor([run.compression.iteration])) == 6).all())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [lambda: PowerSGD(start_powerSGD_iter=0), lambda: TopK(ratio=0.1)])
def test_parameters_that_rest_keep_their_memory(hvd: ModuleType, make: Callable[[], StatefulCompressor]) -> None:
    run = Run(hvd, make(), SHAPES)
    run.step(0)
    before = run.errors()
    run.parameters[2].requires_grad_(False)
    run.optimizer.zero_grad()
    run.parameters[0].backward(torch.ones(SHAPES[0]))
    run.optimizer.step()
    assert torch.equal(run.errors()["p2"], before["p2"])
    assert not torch.equal(run.errors()["p0"], before["p0"])
    run.parameters[2].requires_grad_(True)
    reduced = run.step_with([torch.zeros(shape) for shape in SHAPES])
    assert same_on_all_ranks(reduced)
    # What waited has arrived.
    assert bool(reduced[2].any())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [lambda: PowerSGD(start_powerSGD_iter=2), lambda: TopK(ratio=0.1)])
def test_ranks_that_join_keep_in_step(hvd: ModuleType, make: Callable[[], StatefulCompressor]) -> None:
    run = Run(hvd, make(), SHAPES)
    for step in range(5 if hvd.rank() else 1):
        run.step(step)
    hvd.join()
    assert bool((allgather(torch.tensor([run.compression.iteration])) == 5).all())
    for step in (5, 6):
        assert same_on_all_ranks(run.step(step))


@pytest.fixture
def restarted(hvd: ModuleType) -> Iterator[Callable[..., None]]:
    """Start hvlike anew with overlap switched on or off, or with process sets."""

    def restart(overlap: str = "0", process_sets: Sequence[Any] = ()) -> None:
        hvd.shutdown()
        os.environ["HVLIKE_OVERLAP"] = overlap
        hvd.init(process_sets=list(process_sets))

    yield restart
    hvd.shutdown()
    os.environ.pop("HVLIKE_OVERLAP", None)
    hvd.init()


@pytest.mark.parametrize("make", [lambda: PowerSGD(2, start_powerSGD_iter=1), lambda: TopK(ratio=0.1)])
def test_overlap_changes_nothing(
    hvd: ModuleType, restarted: Callable[..., None], make: Callable[[], StatefulCompressor]
) -> None:
    results: list[list[Tensor]] = []
    for overlap in ("0", "1"):
        restarted(overlap)
        run = Run(hvd, make(), SHAPES, groups=2)
        for step in range(4):
            run.step(step)
        assert same_on_all_ranks(run.parameters)
        results.append([parameter.detach() for parameter in run.parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    "make", [lambda: PowerSGD(40, start_powerSGD_iter=1, min_compression_rate=1e-3), lambda: TopK(1.0)]
)
def test_process_sets(hvd: ModuleType, restarted: Callable[..., None], make: Callable[[], StatefulCompressor]) -> None:
    size = hvd.size()
    sets = [hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))]
    restarted(process_sets=sets)
    run = Run(hvd, make(), SHAPES, process_set=sets[hvd.rank() % 2])
    members = range(hvd.rank() % 2, size, 2)
    for step in range(3):
        reduced = run.step(step)
        everybody = run.everybody(step)
        for index, gradient in enumerate(reduced):
            expected = torch.stack([everybody[rank][index] for rank in members]).mean(dim=0)
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compression", [PowerSGD(), TopK(k=1)], ids=["PowerSGD", "TopK"])
def test_single_calls_are_refused_and_the_job_goes_on(hvd: ModuleType, compression: StatefulCompressor) -> None:
    with pytest.raises(UsageError, match=r"belongs to DistributedOptimizer\(compression=\.\.\.\)"):
        hvd.allreduce(torch.ones(3), compression=compression)
    with pytest.raises(UsageError, match=r"belongs to DistributedOptimizer\(compression=\.\.\.\)"):
        hvd.grouped_allreduce([torch.ones(3)], compression=compression)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3


def test_what_an_optimizer_refuses(hvd: ModuleType) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(UsageError, match=r"got the class PowerSGD; make one: PowerSGD\(\.\.\.\)"):
        hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.PowerSGD)
    with pytest.raises(UsageError, match="TopK approximates sums: expected op Average or Sum, got op Adasum"):
        hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.TopK(k=1), op=hvd.Adasum)


@pytest.mark.mpi(min_size=2)
def test_one_compressor_serves_one_optimizer(hvd: ModuleType) -> None:
    compression = PowerSGD(start_powerSGD_iter=0)
    first = Run(hvd, compression, SHAPES)
    first.step(0)
    second = Run(hvd, compression, SHAPES)
    with pytest.raises(UsageError, match="used by another DistributedOptimizer already"):
        second.step(0)
    del first
    gc.collect()
    assert same_on_all_ranks(Run(hvd, compression, SHAPES).step(1))


@pytest.mark.mpi(min_size=2)
def test_different_compressors_are_an_error_on_every_rank_and_the_job_goes_on(hvd: ModuleType) -> None:
    different: list[tuple[Compressor, Compressor]] = [
        (PowerSGD(1), PowerSGD(2)),
        (PowerSGD(random_seed=1), PowerSGD()),
        (TopK(k=1), TopK(ratio=0.5)),
        (TopK(k=1), hvd.Compression.none),
    ]
    for own, others in different:
        run = Run(hvd, own if hvd.rank() == 0 else others, SHAPES)
        with pytest.raises(MismatchError, match=r"(?s)Mismatched settings.*rank 0 .*rank 1 "):
            run.step(0)
    assert same_on_all_ranks(Run(hvd, TopK(k=1), SHAPES).step(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank must be a whole number >= 1, got 0"),
        ({"matrix_approximation_rank": 1.5}, "matrix_approximation_rank must be a whole number >= 1, got 1.5"),
        ({"start_powerSGD_iter": -1}, "start_powerSGD_iter must be a whole number >= 0, got -1"),
        ({"min_compression_rate": 0}, "min_compression_rate must be > 0, got 0"),
        ({"orthogonalization_epsilon": -1e-3}, "orthogonalization_epsilon must be >= 0, got -0.001"),
        ({"random_seed": "x"}, "random_seed must be a whole number, got 'x'"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PowerSGD(**arguments)
