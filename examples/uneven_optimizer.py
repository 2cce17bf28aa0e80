"""Train with DistributedOptimizer on ranks that have different numbers of batches.

    mpirun -n 2 python examples/uneven_optimizer.py

The digits are dealt to the ranks unevenly: rank r gets r + 1 parts of them. In each epoch a rank that is through its
part stands in for the others until all are through; then all ranks have the same parameters, momentum and learning
rate. The averages of gradients are those over the ranks that still have batches.
"""

import argparse

import torch
from digits import load_data
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset, Subset

import hvlike as hvd
from hvlike.join import Join


def main() -> None:
    """Train, then show that nothing is left apart."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    loader = DataLoader(own_part(train_set), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    # A step of the schedule is an epoch: the ranks have different numbers of batches.
    scheduler = ExponentialLR(inner, gamma=0.9)
    for _ in range(options.epochs):
        with Join([optimizer], divide_by_initial_world_size=False):
            for images, labels in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(images), labels).backward()
                hvd.clip_grad_norm_(optimizer, 5.0)
                optimizer.step()
        scheduler.step()
    report(model, inner, test_set, len(loader))
    hvd.shutdown()


def own_part(data: Dataset) -> Subset:
    """Return rank + 1 of the 1 + 2 + ... + size equal parts of the data."""
    parts = hvd.size() * (hvd.size() + 1) // 2
    first = hvd.rank() * (hvd.rank() + 1) // 2
    return Subset(data, [index for index in range(len(data)) if first <= index % parts <= first + hvd.rank()])


@torch.no_grad()
def report(model: nn.Module, optimizer: torch.optim.Optimizer, test_set: Dataset, batches: int) -> None:
    """Print what each rank had, how good the model is, and whether the ranks are apart."""
    images, labels = test_set[:]
    accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    flat = torch.cat([tensor.detach().flatten() for tensor in [*model.parameters(), *momentum]])
    apart = float((hvd.allreduce(flat, op=hvd.Max) - hvd.allreduce(flat, op=hvd.Min)).max())
    counts = hvd.allgather_object(batches)
    if hvd.rank() == 0:
        print(f"batches in an epoch: {', '.join(f'rank {rank}: {count}' for rank, count in enumerate(counts))}")
        print(f"test accuracy {accuracy:.3f}")
        print(f"largest difference between ranks: {apart}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
