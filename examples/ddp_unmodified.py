"""A program of torch's DistributedDataParallel, as it is written for gloo or nccl; only the backend's name is another.

    mpirun -n 2 python examples/ddp_unmodified.py

It classifies scikit-learn's 1 797 handwritten digits. Nothing of hvlike is imported and no MASTER_ADDR, RANK or
WORLD_SIZE is set: the backend is known to torch, and the ranks are those of mpirun. In the end rank 0 trains the same
model alone on the whole batches, and compares.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train on this rank's share of each batch, test, compare."""
    options = parse_arguments()
    dist.init_process_group("hvlike")
    rank, size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_data()
    model = DistributedDataParallel(build_model(options.seed))
    sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=options.batch_size // size, sampler=sampler, drop_last=True)
    optimizer = build_optimizer(model, options)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.double)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}", flush=True)
    correct = count_correct(model, test_set, rank, size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"{size} rank(s), backend {dist.get_backend()}, test accuracy: {correct.item() / len(test_set):.3f}")
        alone = train_alone(train_set, options, size)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        print(f"largest difference to one process: {difference:.1e}", flush=True)
    dist.destroy_process_group()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The first four fifths for training, the last fifth for testing; double precision makes the comparison sharp."""
    digits = load_digits()
    images = torch.tensor(digits.images).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = len(labels) * 4 // 5
    return TensorDataset(images[:train], labels[:train]), TensorDataset(images[train:], labels[train:])


def build_model(seed: int) -> nn.Module:
    """Two convolutions and a classifier."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    ).double()  # fmt: skip


def build_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


@torch.no_grad()
def count_correct(model: nn.Module, test_set: TensorDataset, rank: int, size: int) -> torch.Tensor:
    """How many of this rank's share of the test images are recognised."""
    images, labels = test_set[rank::size]
    return (model(images).argmax(dim=1) == labels).sum()


def train_alone(train_set: TensorDataset, options: argparse.Namespace, size: int) -> nn.Module:
    """One process with the whole batches, each put together from what the samplers give the ranks."""
    model = build_model(options.seed)
    optimizer = build_optimizer(model, options)
    share = options.batch_size // size
    samplers = [DistributedSampler(train_set, size, rank, seed=options.seed, drop_last=True) for rank in range(size)]
    for epoch in range(options.epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [torch.tensor(list(sampler)) for sampler in samplers]
        for start in range(0, len(orders[0]) - share + 1, share):
            images, labels = train_set[torch.cat([order[start : start + share] for order in orders])]
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48, help="images per step, on all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
