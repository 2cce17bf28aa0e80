"""Tensor parallelism over MPI: the ranks share out the heads and the columns of each layer of a transformer.

    mpirun -n 2 python examples/tensor_parallel.py

torch's parallelize_module makes the parameters DTensors. All ranks see the same batch; each computes its heads and its
columns of the hidden layer, and two sums over the ranks in each block put the results together. In the end rank 0
trains the same model alone, and compares.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import Block, Text, build_transformer, loss_of, train_alone


def main() -> None:
    """Share out the layers, train, compare."""
    options = parse_arguments()
    dist.init_process_group("hvlike")
    rank, size = dist.get_rank(), dist.get_world_size()
    text = Text()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    model = share_out(build_transformer(text.letters, options.depth, options.seed), mesh)
    if rank == 0:
        weight = model[1].up.weight
        print(f"{size} rank(s), each keeps {list(weight.to_local().shape)} of {list(weight.shape)} of a layer")

    optimizer = build_optimizer(model, options)
    for step, (whole, following) in enumerate(batches(text, options)):
        optimizer.zero_grad()
        loss = loss_of(model(whole), following)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    trained = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    if rank == 0:
        alone = build_transformer(text.letters, options.depth, options.seed)
        train_alone(alone, build_optimizer(alone, options), batches(text, options))
        pairs = zip(trained, alone.parameters(), strict=True)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        print(f"largest difference to one process: {difference:.1e}", flush=True)
    dist.destroy_process_group()


def share_out(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Columns of what goes into heads and hidden units, rows of what comes out of them."""
    inner = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for part in model:
        if isinstance(part, Block):
            parallelize_module(part, mesh, inner)
    head = {"1": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model[-1], mesh, head)
    return model


def build_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The same for all; parameters that are shared out and such that are not have updates of their own."""
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, foreach=False)


def batches(text: Text, options: argparse.Namespace):
    """The same batches, each time from the first one on."""
    return text.batches(options.steps, options.batch_size, options.seed)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=24, help="pieces of text per step")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
