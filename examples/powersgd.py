"""Train on handwritten digits with compressed gradients: PowerSGD or top-k, with a memory of what was not sent.

    mpirun -n 2 python examples/powersgd.py
    mpirun -n 2 python examples/powersgd.py --compression none
    mpirun -n 2 python examples/powersgd.py --compression topk --ratio 0.02

PowerSGD (Vogels et al., 2019) sends two thin matrices in place of each gradient matrix; top-k sends the largest
elements. What they leave out is added to the gradient of the next step. The first steps are sent in full, as gradients
change most there. One checkpoint holds the memory of all ranks: `--resume` continues as if nothing had happened.
"""

import argparse
from pathlib import Path

import torch
from digits import build_model, load_data, test, warmed_up_schedule
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd


def main() -> None:
    """Train, then print the accuracy and what was sent."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)

    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    compression = choose_compression(options, len(loader))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    scheduler = LambdaLR(optimizer, warmed_up_schedule(options, len(loader)))
    first_epoch = restore(options, model, optimizer, scheduler) if options.resume else 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(first_epoch, options.stop_after or options.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(options.seed + epoch * hvd.size() + hvd.rank())
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        save(options, model, optimizer, scheduler, epoch + 1)

    accuracy = test(model, test_set)
    # The same on every rank, bit by bit.
    checksum = sum(parameter.detach().double().sum() for parameter in model.parameters()).item()
    if hvd.rank() == 0:
        rate = 1.0 if options.compression == "none" else compression.compression_stats().compress_rate
        print(f"test accuracy: {accuracy:.3f}")
        print(f"bytes of gradients / bytes sent: {rate:.1f}")
        print(f"checksum of the model: {checksum!r}", flush=True)
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=["none", "powersgd", "topk"], default="powersgd")
    parser.add_argument("--rank", type=int, default=2, help="columns of PowerSGD's matrices")
    parser.add_argument("--ratio", type=float, default=0.01, help="the part of the elements that top-k sends")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--full-epochs", type=float, default=1, help="epochs that PowerSGD does not compress")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank")
    parser.add_argument("--warmup-epochs", type=float, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    parser.add_argument("--output", type=Path, default=Path("out/powersgd"), help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end early, as if the job's time had run out")
    return parser.parse_args()


def choose_compression(options: argparse.Namespace, steps_per_epoch: int):
    """What the gradients travel as."""
    if options.compression == "powersgd":
        return hvd.Compression.PowerSGD(
            matrix_approximation_rank=options.rank,
            start_powerSGD_iter=int(options.full_epochs * steps_per_epoch),
            min_compression_rate=1.5,
        )
    return hvd.Compression.TopK(ratio=options.ratio) if options.compression == "topk" else hvd.Compression.none


def save(options: argparse.Namespace, model: torch.nn.Module, optimizer, scheduler: LambdaLR, epochs: int) -> None:
    """Write the checkpoint on rank 0, with the compression errors of all ranks."""
    state = hvd.gather_optimizer_state(optimizer, root_rank=0)
    if hvd.rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        parts = {"model": model.state_dict(), "optimizer": state, "scheduler": scheduler.state_dict(), "epochs": epochs}
        torch.save(parts, options.output / "checkpoint.pt")


def restore(options: argparse.Namespace, model: torch.nn.Module, optimizer, scheduler: LambdaLR) -> int:
    """Read the checkpoint on every rank: each takes its own errors from it. Returns how many epochs are done."""
    state = torch.load(options.output / "checkpoint.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["epochs"]


if __name__ == "__main__":
    main()
