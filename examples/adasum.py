"""Train with Adasum: the learning rate of one rank serves any number of ranks.

    mpirun -n 2 python examples/adasum.py
    mpirun -n 3 python examples/adasum.py --op sum

Averaging makes the step of many ranks as long as that of one, so the rate has to grow with their number, after a
warm-up; summing makes it longer, and too long where the ranks agree. Adasum (Maleki et al., 2021, arXiv 2006.02924)
adds the changes of the ranks where they point in different directions and averages them where they agree. Each rank's
optimizer steps on its own gradients with its own momentum, then the changes of the parameters are combined.
"""

import argparse

import torch
from digits import build_model, load_data, test
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd

OPS = {"adasum": hvd.Adasum, "average": hvd.Average, "sum": hvd.Sum}


def main() -> None:
    """Train for some epochs and print the accuracy after each."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=OPS[options.op])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        accuracy = test(model, test_set)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.3f}", flush=True)

    difference = largest_difference(model)
    if hvd.rank() == 0:
        print(f"largest difference between ranks: {difference}", flush=True)
    hvd.shutdown()


def largest_difference(model: nn.Module) -> float:
    """How far apart the ranks' parameters are; 0 when all is well."""
    numbers = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return (hvd.allreduce(numbers, op=hvd.Max) - hvd.allreduce(numbers, op=hvd.Min)).max().item()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one rank, not scaled")
    parser.add_argument("--op", choices=OPS, default="adasum", help="how the ranks' steps become one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
