"""A model whose two stages live on different ranks, trained end to end with distributed autograd.

    mpirun -n 2 python examples/autograd_model_parallel.py

Rank 0 owns the first stage of a convolutional network for scikit-learn's 1 797 handwritten digits, the last rank the
second stage. Rank 0 writes the training loop as if both were at hand: it calls one stage with the result of the other,
runs one backward, and takes one step of an optimizer whose parameters it knows by RRefs. In the end it trains the same
network alone, and compares. With one rank, that rank owns both stages.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvlike as hvd
import hvlike.autograd as dist_autograd
from hvlike import rpc


def main() -> None:
    """Join the job; rank 0 drives the training, the others serve until the end."""
    options = parse_arguments()
    hvd.init()
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        drive(options)
    rpc.shutdown()
    hvd.shutdown()


class TwoStages(nn.Module):
    """A network cut in two; each stage is made where it lives."""

    def __init__(self, first_rank: int, second_rank: int, seed: int) -> None:
        super().__init__()
        self.first = rpc.RemoteModule(f"rank:{first_rank}", make_first_stage, (seed,))
        self.second = rpc.RemoteModule(f"rank:{second_rank}", make_second_stage, (seed,))

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 8, 8) to (N, 10)."""
        return self.second(self.first(images))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """References to all parameters, for the optimizer."""
        return [*self.first.remote_parameters(), *self.second.remote_parameters()]


def make_first_stage(seed: int) -> nn.Module:
    """Convolutions; double precision makes the comparison sharp."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    ).double()


def make_second_stage(seed: int) -> nn.Module:
    """A hidden layer and the classifier."""
    torch.manual_seed(seed + 1)
    return nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def drive(options: argparse.Namespace) -> None:
    """Train the two stages, test them, and compare with the whole network in one process."""
    from digits import load_data

    train_set, test_set = load_data()
    images, labels = train_set[:]
    batches = list(zip(images.double().split(options.batch_size), labels.split(options.batch_size), strict=True))
    model = TwoStages(0, hvd.size() - 1, options.seed)
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=options.lr, momentum=0.9)
    for epoch in range(options.epochs):
        total = 0.0
        for batch, wanted in batches:
            with dist_autograd.context() as context_id:
                loss = functional.cross_entropy(model(batch), wanted)
                dist_autograd.backward(context_id, [loss], mode=options.mode)
                optimizer.step(context_id)
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(batches):.4f}", flush=True)

    test_images, test_labels = test_set[:]
    with torch.no_grad():
        correct = model(test_images.double()).argmax(dim=1) == test_labels
    stages = (model.first, model.second)
    print(f"stages on {' and '.join(stage.get_module_rref().owner_name() for stage in stages)}")
    print(f"test accuracy: {correct.double().mean():.3f}")

    alone = train_alone(batches, options)
    trained = nn.Sequential(*(stage.get_module_rref().to_here() for stage in stages))
    pairs = zip(trained.parameters(), alone.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference to one process: {difference:.1e}", flush=True)


def train_alone(batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> nn.Module:
    """The same training in one process."""
    model = nn.Sequential(make_first_stage(options.seed), make_second_stage(options.seed))
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    for _ in range(options.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--mode", choices=["fast", "safe", "smart"], default="safe")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
