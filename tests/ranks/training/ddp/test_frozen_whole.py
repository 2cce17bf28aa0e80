"""A module that is frozen whole after it was wrapped, as the critic of a GAN is, stays a module like any other."""

import copy
import pickle
from types import ModuleType

import pytest
import torch
from support.training.problem import make_model, same_on_all_ranks, share, whole_batch

from hvlike.nn import DistributedDataParallel


def test_it_is_copied_and_pickled(hvd: ModuleType) -> None:
    model = DistributedDataParallel(make_model())
    model.requires_grad_(False)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.requires_grad_(True)
        again(share(hvd, whole_batch())[0]).square().mean().backward()
        assert same_on_all_ranks([each.grad for each in again.parameters() if each.grad is not None])


@pytest.mark.parametrize("hooked", [False, True])
def test_it_leaves_a_join_context(hvd: ModuleType, hooked: bool) -> None:
    model = DistributedDataParallel(make_model())
    if hooked:
        model.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer(), name="bucket"))
    model.requires_grad_(False)
    with model.join(), torch.enable_grad():
        for step in range(hvd.rank()):
            model(share(hvd, whole_batch(step))[0])
    assert same_on_all_ranks(model.parameters())


@pytest.mark.mpi(min_size=2)
def test_after_a_join_context_that_some_ranks_took_no_part_in(hvd: ModuleType) -> None:
    """Sums from before the context make no rank reduce alone."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    inputs = share(hvd, whole_batch())[0]
    with model.no_sync():
        model(inputs).square().mean().backward()
    with model.join():
        if hvd.rank() == 0:
            model.zero_grad()
            model(inputs).square().mean().backward()
    model.zero_grad()
    model.requires_grad_(False)
    model(inputs.clone().requires_grad_(True)).square().mean().backward()
    assert all(each.grad is None for each in model.parameters())
    model.requires_grad_(True)
    model(inputs).square().mean().backward()
    assert same_on_all_ranks([each.grad for each in model.parameters() if each.grad is not None])
