"""Train a small network on handwritten digits with Lightning, on any number of ranks.

    mpirun -n 2 python examples/lightning_digits.py

All that is hvlike's is the strategy of the Trainer. Lightning deals the images out to the ranks, logs averages over
them, computes the accuracy over all images, and writes checkpoints on rank 0. `--resume` goes on from the last one.
"""

import argparse
from pathlib import Path

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from hvlike.integrations.lightning import HvlikeStrategy


class Digits(lightning.LightningDataModule):
    """scikit-learn's 1 797 scanned digits: four fifths for training, one fifth for testing."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images; they come with scikit-learn."""
        digits = load_digits()
        images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, train = order[: len(labels) // 5], order[len(labels) // 5 :]
        self.train_set = TensorDataset(images[train], labels[train])
        self.test_set = TensorDataset(images[test], labels[test])

    def train_dataloader(self) -> DataLoader:
        """Batches of one rank."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        """Large batches: nothing is learnt from them."""
        return DataLoader(self.test_set, batch_size=256)


class Classifier(lightning.LightningModule):
    """A network with one hidden layer."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of one batch of one rank."""
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Count what is right; the metric looks at all ranks when it is computed."""
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A plain optimizer: the strategy reduces the gradients."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(arguments: list[str] | None = None) -> float:
    """Train, or go on training, then test. Returns the accuracy."""
    options = parse_arguments(arguments)
    lightning.seed_everything(options.seed, verbose=False)
    checkpoints = ModelCheckpoint(options.output, filename="last", save_top_k=1, enable_version_counter=False)
    trainer = lightning.Trainer(
        strategy=HvlikeStrategy(),
        max_epochs=options.epochs,
        default_root_dir=options.output,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Digits(options.batch_size)
    model = Classifier(options.lr)
    trainer.fit(model, data, ckpt_path=options.output / "last.ckpt" if options.resume else None)
    (result,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {result['accuracy']:.3f}", flush=True)
    return result["accuracy"]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("out/lightning"), help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
