"""A job for test_lightning.py: a Trainer on several ranks is held against one process with the whole batches."""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

import hvlike as hvd
from hvlike.errors import UsageError
from hvlike.integrations.lightning import HvlikeStrategy

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import lightning_digits

BATCH, EPOCHS, LR = 8, 2, 0.1
DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
LABELS = (DATA[:, 0] > 0).long() + (DATA[:, 1] > 0).long()


class Model(lightning.LightningModule):
    """Momentum, batch normalisation, clipping, accumulation, metrics: what has to see all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3 + hvd.rank())
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        output = self.network(batch[0])
        self.accuracy(output, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("largest", output.max(), sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=LR, momentum=0.9)


class Adversaries(lightning.LightningModule):
    """Two optimizers by hand, with two backward passes inside of one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4 + hvd.rank())
        self.networks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])

    def losses(self, data: Tensor) -> Iterator[Tensor]:
        maker, judge = self.networks
        yield functional.softplus(-judge(maker(data))).mean()
        yield functional.softplus(judge(maker(data).detach())).mean() + functional.softplus(-judge(data)).mean()

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch[0]), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(network.parameters(), lr=LR) for network in self.networks]


class Twice(Model):
    """Reduces its gradients by itself, too."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(super().configure_optimizers())


def make_trainer(folder: str, strategy: Any = "hvlike", **settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(strategy=strategy, max_epochs=EPOCHS, default_root_dir=folder, **quiet, **settings)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(DATA, LABELS), batch_size=BATCH)


def whole_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each batch of all ranks in one: Lightning shuffles the samples and deals them out one by one."""
    sampler = DistributedSampler(range(len(DATA)), num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    for places in torch.tensor(list(sampler)).split(BATCH * hvd.size()):
        yield DATA[places], LABELS[places]


def from_first_rank(module: nn.Module) -> nn.Module:
    """What a model of rank 0 starts from."""
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    return module


def check_same(module: nn.Module, reference: nn.Module) -> None:
    for (name, value), expected in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if value.is_floating_point():
            assert all(torch.equal(value, other) for other in hvd.allgather(value[None])), name


def automatic(folder: str) -> None:
    reference = from_first_rank(Model()).network
    model = Model()
    trainer = make_trainer(folder, gradient_clip_val=0.3, accumulate_grad_batches=2, sync_batchnorm=True)
    trainer.fit(model, loader(), loader())

    optimizer = torch.optim.SGD(reference.parameters(), lr=LR, momentum=0.9)
    for epoch in range(EPOCHS):
        losses = []
        for index, (data, labels) in enumerate(whole_batches(epoch)):
            losses.append(functional.cross_entropy(reference(data), labels))
            (losses[-1] / 2).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    check_same(model.network, reference)
    assert type(model.network[1]) is nn.BatchNorm1d
    assert trainer.world_size == hvd.size()
    assert trainer.is_global_zero == model.prepared == (hvd.rank() == 0)
    torch.testing.assert_close(trainer.callback_metrics["loss"], torch.stack(losses).mean().detach())
    output = reference.eval()(DATA)
    right = (output.argmax(1) == LABELS).float().mean()
    # Another machine may see one sample otherwise.
    assert abs(trainer.callback_metrics["accuracy"] - right) < 1.5 / len(DATA)
    torch.testing.assert_close(trainer.callback_metrics["largest"], output.max().detach())

    hvd.barrier()
    (written,) = Path(folder).rglob("*.ckpt")
    other = Model()
    (result,) = make_trainer(folder).validate(other, loader(), ckpt_path=written, verbose=False)
    assert abs(result["accuracy"] - right) < 1.5 / len(DATA)
    check_same(other.network, reference)


def manual(folder: str) -> None:
    reference = from_first_rank(Adversaries())
    model = Adversaries()
    make_trainer(folder, strategy=HvlikeStrategy(find_unused_parameters=True)).fit(model, loader())
    optimizers = reference.configure_optimizers()
    for epoch in range(EPOCHS):
        for data, _labels in whole_batches(epoch):
            for optimizer, loss in zip(optimizers, reference.losses(data), strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    check_same(model, reference)


def what_a_strategy_offers(folder: str) -> None:
    strategy = HvlikeStrategy()
    rank, size = hvd.rank(), hvd.size()
    assert strategy.broadcast(f"from {rank}", src=size - 1) == f"from {size - 1}"
    assert strategy.all_gather(torch.tensor(rank)).tolist() == list(range(size))
    assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum") == sum(range(size))
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(rank == 0)
    shared = torch.tensor([float(rank)], requires_grad=True)
    (strategy.all_gather(shared, sync_grads=True).sum() * (rank + 1)).backward()
    assert shared.grad == sum(range(size + 1))


def reducing_twice_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="Return the plain optimizer"):
        make_trainer(folder).fit(Twice(), loader())


def the_example_learns_and_resumes(folder: str) -> None:
    settings = ["--output", f"{folder}/whole", "--batch-size", "16"]
    assert lightning_digits.main([*settings, "--epochs", "3"]) > 0.85
    settings[1] = f"{folder}/parts"
    lightning_digits.main([*settings, "--epochs", "2"])
    lightning_digits.main([*settings, "--epochs", "3", "--resume"])
    hvd.barrier()
    whole, parts = (torch.load(f"{folder}/{name}/last.ckpt", weights_only=True) for name in ("whole", "parts"))
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(value, parts["state_dict"][name], rtol=1e-5, atol=1e-6)


def main() -> None:
    warnings.simplefilter("ignore")
    hvd.init()
    checks = automatic, manual, what_a_strategy_offers, reducing_twice_is_refused, the_example_learns_and_resumes
    for check in checks:
        folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
        check(folder)
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"{check.__name__}: well", flush=True)


if __name__ == "__main__":
    main()
