"""Train two models at once: the even ranks train one, the odd ranks the other.

    mpirun -n 4 python examples/process_sets.py

Each half of the ranks is a process set. Broadcasts, gradients and averages of a model stay inside its set, so the two
trainings go on side by side and never wait for each other. Each model is batch-normalised over its own ranks. At the
end all ranks exchange the results. With one rank, that rank trains both models, one after the other.
"""

import argparse

import torch
from digits import load_data
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd

WIDTHS = {"narrow": 16, "wide": 128}


def main() -> None:
    """Train the model of this rank's half, then compare all."""
    options = parse_arguments()
    hvd.init(process_sets="dynamic")
    halves = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in range(2)] if hvd.size() > 1 else []
    names = list(WIDTHS)
    results = {}
    for name, process_set in zip(names, halves or [hvd.global_process_set] * 2, strict=True):
        if process_set.included():
            results[name] = train(options, WIDTHS[name], process_set)
    everybody = hvd.allgather_object(results)
    if hvd.rank() == 0:
        for name in names:
            found = [each[name] for each in everybody if name in each]
            same = len(set(found)) == 1
            print(f"{name}: {len(found)} rank(s), test accuracy {found[0]:.3f}, the same on all: {same}", flush=True)
    hvd.shutdown()


def train(options: argparse.Namespace, width: int, process_set: hvd.ProcessSet) -> float:
    """Train a model on the ranks of a set. Returns its accuracy on the test images."""
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    sampler = DistributedSampler(train_set, num_replicas=process_set.size(), rank=process_set.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
    model = hvd.convert_sync_batchnorm(model, process_set).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * process_set.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=process_set)
    # The root is named by its rank in the job: the first rank of the set.
    hvd.broadcast_parameters(model.state_dict(), root_rank=process_set.ranks[0], process_set=process_set)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return test(model, test_set, process_set)


@torch.no_grad()
def test(model: nn.Module, test_set: Dataset, process_set: hvd.ProcessSet) -> float:
    """Test each image on one rank of the set. Returns the accuracy on all of them."""
    model.eval()
    images, labels = test_set[process_set.rank() :: process_set.size()]
    correct = (model(images).argmax(dim=1) == labels).sum()
    return hvd.allreduce(correct, op=hvd.Sum, process_set=process_set).item() / len(test_set)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
