"""Save a training with torch.distributed.checkpoint, and go on with it on another number of ranks.

    mpirun -n 3 python examples/distributed_checkpoint.py
    mpirun -n 2 python examples/distributed_checkpoint.py --resume

All ranks write: the parameters are shared out among them, and each writes its share of the optimizer's state, which is
the only one that it has. On another number of ranks each reads what its share is there.
"""

import argparse
from pathlib import Path

import torch
from digits import build_model, load_data, test
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd
from hvlike.integrations.distributed_checkpoint import load, save
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer


def main() -> None:
    """Train, or go on training, and save after each epoch."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    train_set, test_set = load_data()
    # As many images in a step, on any number of ranks.
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=options.batch_size // hvd.size(), sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=options.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)

    first = 0
    if options.resume:
        newest = max(options.output.glob("epoch-*"), key=lambda folder: int(folder.name.removeprefix("epoch-")))
        values = load(newest, model, optimizer, schedule=schedule)
        first = values["epoch"] + 1
        if hvd.rank() == 0:
            saved_on = values["ranks"]
            print(f"saved after epoch {first} on {saved_on} ranks, goes on on {hvd.size()}", flush=True)
            print(f"test accuracy then: {values['accuracy']:.3f}", flush=True)
        again = test(model.module, test_set)
        assert abs(again - values["accuracy"]) < 1e-6, "the model is not the one that was saved"

    for epoch in range(first, first + options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        schedule.step()
        accuracy = test(model.module, test_set)
        more = {"epoch": epoch, "ranks": hvd.size(), "accuracy": accuracy}
        save(options.output / f"epoch-{epoch}", model, optimizer, schedule=schedule, **more)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.3f}", flush=True)
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=48, help="images per step, on all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("out/distributed_checkpoint"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
