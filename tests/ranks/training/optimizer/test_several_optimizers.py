"""Several optimizers in one program, named or not, do not disturb each other."""

from types import ModuleType

import torch
from support.training.problem import loss_of, make_model, same_on_all_ranks, share, whole_batch
from torch import nn

from hvlike.training.distributed_optimizer import DistributedOptimizer


def test_one_backward_pass_feeds_two_unnamed_optimizers(hvd: ModuleType) -> None:
    model = make_model()
    parameters = list(model.parameters())
    first = DistributedOptimizer(torch.optim.SGD(parameters[:2], lr=0.1))
    second = DistributedOptimizer(torch.optim.AdamW(parameters[2:], lr=0.01))
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, share(hvd, whole_batch(step))).backward()
        first.step()
        second.step()
    assert same_on_all_ranks(parameters)
    assert hvd.size() == 1 or first.gradients.reducers.name != second.gradients.reducers.name


def test_two_networks_in_turn(hvd: ModuleType) -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    maker_optimizer = DistributedOptimizer(torch.optim.Adam(maker.parameters(), lr=0.01), maker.named_parameters())
    judge_optimizer = DistributedOptimizer(torch.optim.Adam(judge.parameters(), lr=0.01), judge.named_parameters())
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        judge_optimizer.zero_grad()
        (judge(torch.randn(3, 4)).mean() - judge(maker(torch.randn(3, 4)).detach()).mean()).backward()
        judge_optimizer.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        maker_optimizer.zero_grad()
        judge(maker(torch.randn(3, 4))).mean().backward()
        maker_optimizer.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)
    assert same_on_all_ranks([*maker.parameters(), *judge.parameters()])


def test_optimizers_made_in_another_order_on_each_rank(hvd: ModuleType) -> None:
    models = [make_model(seed) for seed in range(2)]
    order = [0, 1] if hvd.rank() % 2 == 0 else [1, 0]
    optimizers = {index: DistributedOptimizer(torch.optim.SGD(models[index].parameters(), lr=0.1)) for index in order}
    for index, model in enumerate(models):
        loss_of(model, share(hvd, whole_batch())).backward()
        optimizers[index].step()
    assert all(same_on_all_ranks(model.parameters()) for model in models)


def test_wrapping_the_same_parameters_again(hvd: ModuleType) -> None:
    model = make_model()
    for _ in range(2):
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, share(hvd, whole_batch(step))).backward()
            optimizer.step()
        # As in a notebook: the old one is gone only once the new one is there.
        del optimizer
    assert same_on_all_ranks(model.parameters())
