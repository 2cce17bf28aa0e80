"""A job for test_unmodified.py: Lightning and accelerate with torch's own DDP, over hvlike."""

import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvlike  # noqa: F401  # registers the backend where hvlike is on the path and not installed

BATCH, EPOCHS = 8, 2
DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(7), dtype=torch.double)
LABELS = (DATA[:, 0] > 0).long() + (DATA[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_alone(ranks: int) -> nn.Module:
    """Whole batches: what the samplers of so many ranks give them together."""
    model = network()
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for start in range(0, len(DATA), BATCH * ranks):
            optimizer.zero_grad()
            part = slice(start, start + BATCH * ranks)
            functional.cross_entropy(model(DATA[part]), LABELS[part]).backward()
            optimizer.step()
    return model


def check(name: str, model: nn.Module, ranks: int) -> None:
    for mine, other in zip(model.parameters(), trained_alone(ranks).parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-9, atol=1e-10)
    print(f"{name} over {dist.get_backend()} on {ranks} ranks: well", flush=True)


def with_accelerate() -> None:
    """It takes the group that runs already."""
    from accelerate import Accelerator

    dist.init_process_group("hvlike")
    accelerator = Accelerator(cpu=True)
    made = network()
    loader = DataLoader(TensorDataset(DATA, LABELS), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(made, optimizer_of(made), loader)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    ranks = dist.get_world_size()
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == list(range(ranks))
    check("accelerate", accelerator.unwrap_model(model), ranks)
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


def with_lightning() -> None:
    """It starts the group itself, by the name of the backend."""
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.network)

    ranks = int(os.environ["WORLD_SIZE"])
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            strategy=DDPStrategy(process_group_backend="hvlike"),
            accelerator="cpu",
            devices=ranks,
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=Path(folder),
        )
        data = TensorDataset(DATA, LABELS)
        # Its own one would shuffle.
        sampler = DistributedSampler(data, ranks, int(os.environ["RANK"]), shuffle=False)
        trainer.fit(model, DataLoader(data, batch_size=BATCH, sampler=sampler))
    check("Lightning", model.network, ranks)


def main() -> None:
    warnings.simplefilter("ignore")
    with_accelerate()
    with_lightning()


if __name__ == "__main__":
    main()
