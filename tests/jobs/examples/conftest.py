"""The examples, several in one job: each has a test of its own, and none imports torch for itself."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest
from support.in_turn import Job
from support.job import CHECKOUT


def jobs(folder: Path) -> list[Job]:
    """All of them. What is resumed is so by other processes than those that stopped."""
    place = quote(str(folder))
    examples = quote(str(CHECKOUT / "examples"))
    digits = f"{examples}/digits.py --epochs 4 --batch-size 64 --lr 0.05 --warmup-epochs 1"
    ported = f"{examples}/ported.py --epochs 3"
    synthetic = f"{examples}/synthetic_benchmark.py --model resnet18 --image-size 32 --batch-size 2 --fp16-allreduce"
    stopped = {
        "digits, stopped": f"{digits} --output {place}/parts --stop-after 2",
        "remote_add": f"{examples}/autograd_remote_add.py --mode smart --draw {place}/graph.dot",
        "model_parallel": f"{examples}/autograd_model_parallel.py --epochs 2 --mode fast",
        "clipping, helper": f"{examples}/gradient_clipping.py --epochs 2 --recipe helper",
        "clipping, explicit": f"{examples}/gradient_clipping.py --epochs 2 --recipe explicit",
        "mixed_precision": f"{examples}/mixed_precision.py --epochs 2 --overflow-at 3",
        "synthetic": f"{synthetic} --num-iters 2 --num-batches-per-iter 1 --num-warmup-batches 1",
        "elastic, calm": f"{examples}/elastic.py --epochs 1",
        "elastic, troubled": f"{examples}/elastic.py --epochs 1 --fail-at 15",
        "ddp_unmodified": f"{examples}/ddp_unmodified.py --epochs 2",
        "fsdp2": f"{examples}/fsdp2.py --steps 20",
        "pipeline, 1f1b": f"{examples}/pipeline.py --steps 20",
    }
    resumed = {
        "digits, resumed": f"{digits} --output {place}/parts --resume",
        "ported, join": f"{ported} --fp16-allreduce --uneven --base-lr 0.03 --save {place}/join.pt",
        "ported, sums": f"{ported} --batches-per-allreduce 2 --base-lr 0.015 --save {place}/sums.pt",
        "uneven_optimizer": f"{examples}/uneven_optimizer.py --epochs 2",
        "joinable_counter": f"{examples}/joinable_counter.py",
        "uneven_zero": f"{examples}/uneven_zero.py",
    }
    three = {
        "adasum": f"{examples}/adasum.py --epochs 3",
        "rnn": f"{examples}/autograd_rnn.py --epochs 1",
        "parameter_server": f"{examples}/rpc_parameter_server.py --epochs 5",
        "pipeline": f"{examples}/rpc_pipeline.py --epochs 2 --batch-size 128 --lr 0.2",
        "reinforcement": f"{examples}/rpc_reinforcement.py --episodes 6",
        "process_sets, 3": f"{examples}/process_sets.py --epochs 3",
        "tensor_parallel": f"{examples}/tensor_parallel.py --steps 20",
        "pipeline, gpipe": f"{examples}/pipeline.py --steps 20 --schedule gpipe",
    }
    alone = {
        "pipeline, 1": f"{examples}/rpc_pipeline.py --epochs 1 --batch-size 128",
        "process_sets, 1": f"{examples}/process_sets.py --epochs 3",
    }
    # This one just as for everybody, nothing of it in tests/startup.
    whole = Job(2, {"digits, whole": f"{digits} --output {place}/whole"}, HVLIKE_TEST_NOTHING_LATE="1")
    hybrid = Job(4, {"hybrid": f"{examples}/autograd_hybrid.py --epochs 3"})
    return [whole, Job(2, stopped), Job(2, resumed), Job(3, three), Job(1, alone), hybrid]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples leave files."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session")
def output_of(folder: Path) -> Callable[[str], str]:
    """What an example has printed, by its name in jobs(). They need packages that the tests of hvlike do without."""
    for name in ("sklearn", "matplotlib"):
        # Only looks: to import them takes a second.
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the examples need {name}")
    job_of = {name: job for job in jobs(folder) for name in job.programs}
    return lambda name: job_of[name].output_of(name)
