"""Train a small convolutional network on handwritten digits, on any number of ranks.

    mpirun -n 2 python examples/digits.py

The data are scikit-learn's 1 797 scanned digits of 8 x 8 pixels. Each rank trains on its share of every epoch, the
learning rate grows with the number of ranks after a warm-up, and rank 0 writes a checkpoint after every epoch.
`--resume` continues from the checkpoint exactly as if the run had not been interrupted.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvlike as hvd


def main() -> None:
    """Train, or go on training, then test."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)

    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = LambdaLR(optimizer, warmed_up_schedule(options, len(loader)))

    history = restore(options, model, optimizer, scheduler) if options.resume else []
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    last_epoch = options.stop_after or options.epochs
    progress = tqdm(range(len(history), last_epoch), desc="epochs", disable=hvd.rank() != 0)
    for epoch in progress:
        sampler.set_epoch(epoch)
        # Dropout differs between ranks and epochs, and a resumed run draws what an uninterrupted one would have drawn.
        torch.manual_seed(options.seed + epoch * hvd.size() + hvd.rank())
        loss = train_epoch(model, loader, optimizer, scheduler)
        accuracy = test(model, test_set)
        history.append({"loss": loss, "accuracy": accuracy})
        progress.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.3f}")
        if hvd.rank() == 0:
            save(options, model, optimizer, scheduler, history)

    if hvd.rank() == 0:
        plot(options, history)
        print(f"loss curve: {options.output / 'loss.png'}")
        print(f"test accuracy: {history[-1]['accuracy']:.3f}", flush=True)
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank")
    parser.add_argument("--warmup-epochs", type=float, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    parser.add_argument("--output", type=Path, default=Path("out/digits"), help="folder of the checkpoint and the plot")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end early, as if the job's time had run out")
    return parser.parse_args()


def load_data(device: torch.device | str = "cpu") -> tuple[TensorDataset, TensorDataset]:
    """Four fifths for training, one fifth for testing, on a device; the same split on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test_size = len(labels) // 5
    test, train = order[:test_size], order[test_size:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    """A convolutional network with about 70 000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def warmed_up_schedule(options: argparse.Namespace, steps_per_epoch: int):
    """Factor of the base rate at each step: from 1 up to the number of ranks, then down to 0 along a cosine."""
    total = options.epochs * steps_per_epoch
    warmup = options.warmup_epochs * steps_per_epoch

    def factor(step: int) -> float:
        if step < warmup:
            return 1 + (hvd.size() - 1) * step / warmup
        remaining = torch.tensor((step - warmup) / max(1, total - warmup) * torch.pi)
        return hvd.size() * 0.5 * (1 + torch.cos(remaining).item())

    return factor


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> float:
    """Train on this rank's share of the images. Returns the loss averaged over all ranks."""
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    return hvd.allreduce(total / len(loader), name="epoch loss").item()


@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset) -> float:
    """Test each image on one rank. Returns the accuracy on all of them."""
    model.eval()
    images, labels = test_set[hvd.rank() :: hvd.size()]
    correct = (model(images).argmax(dim=1) == labels).sum()
    return hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / len(test_set)


def save(options: argparse.Namespace, model: nn.Module, optimizer, scheduler: LambdaLR, history: list[dict]) -> None:
    """Write the checkpoint; a reader finds the old one or the new one, never half of one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    options.output.mkdir(parents=True, exist_ok=True)
    temporary = options.output / "checkpoint.pt.part"
    torch.save({**state, "history": history}, temporary)
    os.replace(temporary, options.output / "checkpoint.pt")


def restore(options: argparse.Namespace, model: nn.Module, optimizer, scheduler: LambdaLR) -> list[dict]:
    """Read the checkpoint on rank 0 alone; the others get its small parts here, and the tensors by broadcast later."""
    small_parts = None
    if hvd.rank() == 0:
        state = torch.load(options.output / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        small_parts = state["scheduler"], state["history"]
    schedule, history = hvd.broadcast_object(small_parts, root_rank=0, name="small parts of the checkpoint")
    scheduler.load_state_dict(schedule)
    return history


def plot(options: argparse.Namespace, history: list[dict]) -> None:
    """Draw the loss and the accuracy over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs = range(1, len(history) + 1)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        epochs,
        [entry["loss"] for entry in history],
        color="tab:blue",
        label=f"training loss, average over {hvd.size()} ranks",
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.plot(epochs, [entry["accuracy"] for entry in history], color="tab:orange", label="test accuracy")
    right.set_ylabel("test accuracy")
    right.set_ylim(0, 1)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(options.output / "loss.png", dpi=120)


if __name__ == "__main__":
    main()
