"""torch.distributed.pipelining over MPI: the blocks of a transformer live on different ranks.

    mpirun -n 2 python examples/pipeline.py

Each batch is cut into micro-batches, which follow each other through the stages: while one stage computes, activations
and gradients of others travel (send and receive between neighbours). In the end the stages come together on rank 0,
which trains the same model alone, and compares.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformer import Text, build_transformer, loss_of, train_alone

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def main() -> None:
    """Cut, train, compare."""
    options = parse_arguments()
    dist.init_process_group("hvlike")
    rank, size = dist.get_rank(), dist.get_world_size()
    text = Text()
    depth = max(options.depth, size - 2)
    parts = build_transformer(text.letters, depth, options.seed)
    first, last = len(parts) * rank // size, len(parts) * (rank + 1) // size
    mine = nn.Sequential(*parts[first:last])
    print(f"rank {rank} has parts {first} to {last - 1} of {len(parts)}", flush=True)

    stage = PipelineStage(mine, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[options.schedule](stage, options.micro_batches, loss_fn=loss_of)
    optimizer = build_optimizer(mine, options)
    for step, (whole, following) in enumerate(batches(text, options)):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        arguments = [whole] if rank == 0 else []
        if rank == size - 1:
            schedule.step(*arguments, target=following, losses=losses)
        else:
            schedule.step(*arguments)
        optimizer.step()
        if rank == size - 1 and step % 10 == 9:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.4f}", flush=True)

    stages = [None] * size if rank == 0 else None
    dist.gather_object(list(mine.parameters()), stages)
    if rank == 0:
        alone = build_transformer(text.letters, depth, options.seed)
        train_alone(alone, build_optimizer(alone, options), batches(text, options))
        trained = [parameter for parameters in stages for parameter in parameters]
        pairs = zip(trained, alone.parameters(), strict=True)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        print(f"largest difference to one process: {difference:.1e}", flush=True)
    dist.destroy_process_group()


def build_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


def batches(text: Text, options: argparse.Namespace):
    """The same whole batches, each time from the first one on."""
    return text.batches(options.steps, options.batch_size, options.seed)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=24, help="pieces of text per step")
    parser.add_argument("--depth", type=int, default=3, help="blocks; the embedding and the last layer come to them")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
