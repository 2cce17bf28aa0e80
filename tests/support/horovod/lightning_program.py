"""A program for Lightning with Horovod, in which nothing was changed: it trains what one process would train."""

import copy
import tempfile
import warnings

import horovod.torch as hvd
import pytorch_lightning
import torch
from pytorch_lightning.strategies import HorovodStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, LR = 8, 3, 0.05
DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
LABELS = (DATA[:, 0] > 0).long()


class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3 + hvd.rank())
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.unused = nn.Linear(4, 4)
        self.gathered = []

    def training_step(self, batch, index):
        data, labels = batch
        self.gathered.append(self.all_gather(torch.tensor([hvd.rank(), index])).tolist())
        loss = functional.cross_entropy(self.network(data), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.5)
        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)) for _ in range(2)]
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, milestones=[EPOCHS])]


def trained_by_one(start):
    """Every rank's batches together, at the learning rates of all of them."""
    network = Model().network
    network.load_state_dict(start)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR * hvd.size(), momentum=0.5)
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = LR * hvd.size() / (1 + epoch)
        for places in torch.arange(len(DATA)).split(BATCH * hvd.size()):
            optimizer.zero_grad()
            functional.cross_entropy(network(DATA[places]), LABELS[places]).backward()
            optimizer.step()
    return network


def main():
    warnings.simplefilter("ignore")
    hvd.init()
    model = Model()
    start = copy.deepcopy(hvd.broadcast_object(model.network.state_dict()))
    sampler = torch.utils.data.distributed.DistributedSampler(
        DATA, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loader = DataLoader(TensorDataset(DATA, LABELS), batch_size=BATCH, sampler=sampler)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pytorch_lightning.Trainer(
            strategy="horovod",
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(model, loader)
    assert isinstance(trainer.strategy, HorovodStrategy)
    assert (trainer.world_size, trainer.global_rank) == (hvd.size(), hvd.rank())
    assert model.gathered[0] == [place for rank in range(hvd.size()) for place in (rank, 0)]
    for value, expected in zip(model.network.parameters(), trained_by_one(start).parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    print(f"rank {hvd.rank()} of {hvd.size()}: well\n", end="", flush=True)


if __name__ == "__main__":
    main()
