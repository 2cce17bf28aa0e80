"""torch's fully_shard over MPI: each rank keeps a share of every parameter, gradient and optimizer state.

    mpirun -n 2 python examples/fsdp2.py

A small transformer learns to foretell letters. Each rank works on its part of each batch; a block's parameters come
together just before they are needed and are let go afterwards. In the end the whole state comes together on rank 0,
which trains the same model alone, and compares.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import Block, Text, build_transformer, loss_of, train_alone


def main() -> None:
    """Shard, train, compare."""
    options = parse_arguments()
    dist.init_process_group("hvlike")
    rank, size = dist.get_rank(), dist.get_world_size()
    text = Text()
    model = build_transformer(text.letters, options.depth, options.seed)
    whole_size = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (size,))
    for part in model:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {rank} keeps {mine} of {whole_size} elements", flush=True)

    optimizer = build_optimizer(model, options)
    for step, (whole, following) in enumerate(batches(text, options)):
        optimizer.zero_grad()
        loss = loss_of(model(whole[rank::size]), following[rank::size])
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            mean = loss.detach() / size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean:.4f}", flush=True)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        alone = build_transformer(text.letters, options.depth, options.seed)
        train_alone(alone, build_optimizer(alone, options), batches(text, options))
        difference = max((state[name] - value).abs().max().item() for name, value in alone.state_dict().items())
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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=24, help="pieces of text per step, on all ranks together")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
