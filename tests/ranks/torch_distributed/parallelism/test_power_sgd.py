"""torch's PowerSGD as a hook of hvlike's DistributedDataParallel: uneven inputs, commits, checkpoints.

Imports of torch's hooks are in the tests, as they take half a second.
"""

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_distributed.problem import batch_of, same_on_all_ranks, share
from support.training.problem import loss_of, make_model
from torch import Tensor, nn

import hvlike as hvd
from hvlike import checkpoint
from hvlike.elastic import TorchState
from hvlike.nn import DistributedDataParallel


def power_sgd() -> Any:
    """The state of a hook that compresses from the third step on."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)


def wrap(model: nn.Module, state: Any, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)


def batch_32(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(step)
    return inputs.float(), targets.float()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, share(batch_32(step % 2))).backward()
        optimizer.step()


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None and parameter.dim() == 2]


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.0005], ids=["one bucket", "several"])
def test_gradients_are_of_low_rank_and_the_loss_falls(bucket_cap_mb: float | None) -> None:
    state = power_sgd()
    model, optimizer = wrap(make_model(0), state, bucket_cap_mb=bucket_cap_mb)
    before = loss_of(model.module, batch_32(0)).item()
    train(model, optimizer, range(8))
    assert state.iter == 8
    # A small matrix may be sent whole.
    assert any(torch.linalg.matrix_rank(gradient, rtol=1e-4) == 1 for gradient in matrices(model))
    assert loss_of(model.module, batch_32(0)).item() < before
    assert same_on_all_ranks(model.parameters())
    assert same_on_all_ranks(matrices(model))


def test_in_16_bits() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    model = DistributedDataParallel(make_model(0))
    model.register_comm_hook(power_sgd(), default_hooks.fp16_compress_wrapper(powerSGD_hook))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    assert same_on_all_ranks(model.parameters())


def test_uneven_inputs() -> None:
    model, optimizer = wrap(make_model(0), power_sgd())
    for _ in range(2):
        with model.join():
            train(model, optimizer, range(2 + 2 * hvd.rank()))
        assert same_on_all_ranks(model.parameters())
    train(model, optimizer, range(2))
    assert same_on_all_ranks(matrices(model))


def test_a_commit_leaves_what_was_not_sent_to_the_hook() -> None:
    model, optimizer = wrap(make_model(0), power_sgd())
    state = TorchState(model=model, optimizer=optimizer)
    train(model, optimizer, range(4))
    state.commit()
    committed = deepcopy(model.module.state_dict())
    train(model, optimizer, range(4, 6))
    state.restore()
    assert all(torch.equal(value, committed[name]) for name, value in model.module.state_dict().items())
    train(model, optimizer, range(4, 8))
    assert same_on_all_ranks(model.parameters())


def test_a_run_goes_on_from_a_checkpoint_and_a_pickled_state(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path, name="folder")
    state = power_sgd()
    model, optimizer = wrap(make_model(0), state)
    train(model, optimizer, range(4))
    checkpoint.save(folder, 4, model=model, optimizer=optimizer)
    pickled = pickle.dumps(state)
    train(model, optimizer, range(4, 7))
    resumed, other = wrap(make_model(1), pickle.loads(pickled))
    checkpoint.load(folder, model=resumed, optimizer=other)
    train(resumed, other, range(4, 7))
    for one, another in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, another)
