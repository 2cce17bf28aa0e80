"""Images per second of a residual network on random images, with the flags of Horovod's benchmark of this name.

mpirun -n 2 python examples/synthetic_benchmark.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from models import MODELS
from torch.nn import functional

import hvlike as hvd


def main() -> None:
    """Warm up, measure, and print the mean over the iterations with its spread."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(hvd.rank())
    step = build_step(options)
    say(f"Model: {options.model}")
    say(f"Batch size: {options.batch_size}")
    unit = "GPU" if options.device == "cuda" else "CPU"
    say(f"Number of {unit}s: {hvd.size()}")

    say("Running warmup...")
    for _ in range(options.num_warmup_batches):
        step()
    say("Running benchmark...")
    rates = []
    for iteration in range(options.num_iters):
        start = time.perf_counter()
        for _ in range(options.num_batches_per_iter):
            step()
        if options.device == "cuda":
            # What was asked of the GPU is not done yet.
            torch.cuda.synchronize()
        rates.append(options.batch_size * options.num_batches_per_iter / (time.perf_counter() - start))
        say(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {unit}")

    own = torch.tensor([statistics.mean(rates), 1.96 * statistics.pstdev(rates)])
    mean, spread = hvd.allreduce(own, name="img/sec").tolist()
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    hvd.shutdown()


def build_step(options: argparse.Namespace) -> Callable[[], None]:
    """Build model, optimizer and data. Returns a function that runs one training step."""
    device = hvd.pin_device(options.device)
    model = MODELS[options.model]().to(device)
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(1000, (options.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def say(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; names are Horovod's, defaults are small enough for CPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet18", help="Horovod: resnet50")
    parser.add_argument("--batch-size", type=int, default=8, help="images per rank and step; Horovod: 32")
    parser.add_argument("--image-size", type=int, default=64, help="height and width in pixels; Horovod: 224")
    parser.add_argument("--fp16-allreduce", action="store_true", help="reduce gradients in 16 bits")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
