"""Train in 16 bits with autocast and a gradient scaler, on CPUs.

    mpirun -n 2 python examples/mixed_precision.py
    mpirun -n 2 python examples/mixed_precision.py --overflow-at 10

The forward pass runs in bfloat16 (CPUs compute float16 a hundred times slower), parameters and gradients stay in
float32, and gradients travel as bfloat16. `--overflow-at STEP` makes the gradients of rank 0 alone infinite at one
step: every rank has to skip that step and lower its scale, or their models would part.
"""

import argparse

import torch
from digits import build_model, load_data, test
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd


def main() -> None:
    """Train, then show that all ranks have the same scale and the same parameters."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = build_model().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=options.lr),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    step = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(images), labels)
            if step == options.overflow_at and hvd.rank() == 0:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            # First wait for the averages, so that every rank looks for infinities in the same numbers.
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            step += 1
        accuracy = test(model, test_set)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.3f}, scale {scaler.get_scale():.0f}", flush=True)

    difference = largest_difference(model, scaler.get_scale())
    if hvd.rank() == 0:
        print(f"largest difference between ranks: {difference}", flush=True)
    hvd.shutdown()


def largest_difference(model: torch.nn.Module, scale: float) -> float:
    """How far apart the ranks' parameters and scales are; 0 when all is well."""
    numbers = torch.cat(
        [parameter.detach().cpu().flatten() for parameter in model.parameters()] + [torch.tensor([scale])]
    )
    high = hvd.allreduce(numbers, name="highest", op=hvd.Max)
    low = hvd.allreduce(numbers, name="lowest", op=hvd.Min)
    return (high - low).max().item()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    parser.add_argument("--overflow-at", type=int, default=-1, metavar="STEP", help="make rank 0 overflow once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
