"""The smallest program with distributed autograd: a sum is computed on another rank, and its gradients come back.

    mpirun -n 2 python examples/autograd_remote_add.py

Rank 0 has two tensors. It has the last rank add them, and multiply them too, and goes on with the sum alone: nothing
that backward reaches has used the product. In torch's FAST mode such a call makes backward wait for ever; here the
gradients are there, whichever mode is chosen that allows it. `--draw graph.dot` writes the graph of both ranks, for
`dot -Tsvg graph.dot`. With one rank, that rank calls itself, and the same messages go from it to itself.
"""

import argparse
from pathlib import Path

import torch

import hvlike as hvd
import hvlike.autograd as dist_autograd
from hvlike import rpc


def main() -> None:
    """Join the job; rank 0 computes, the last rank adds for it."""
    options = parse_arguments()
    hvd.init()
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        compute(options)
    rpc.shutdown()
    hvd.shutdown()


def compute(options: argparse.Namespace) -> None:
    """Add on the last rank, run backward, and compare the gradients with those of one process."""
    torch.manual_seed(options.seed)
    a = torch.rand(3, requires_grad=True)
    b = torch.rand(3, requires_grad=True)
    peer = hvd.size() - 1
    with dist_autograd.context() as context_id:
        total = rpc.rpc_sync(peer, torch.add, args=(a, b))
        rpc.rpc_sync(peer, torch.mul, args=(a, b))
        loss = (total * b).sum()
        dist_autograd.backward(context_id, [loss], mode=options.mode)
        gradients = dist_autograd.get_gradients(context_id)
        if options.draw is not None:
            options.draw.write_text(dist_autograd.draw(context_id, [loss]))
            print(f"graph: {options.draw}")

    expected = torch.autograd.grad(((a + b) * b).sum(), [a, b])
    print(f"rank 0 has a and b, rank {peer} has added them")
    for name, tensor, alone in zip("ab", (a, b), expected, strict=True):
        print(f"gradient of {name}: {gradients[tensor].tolist()}, in one process: {alone.tolist()}")
        assert tensor.grad is None
    difference = max((gradients[each] - alone).abs().max().item() for each, alone in zip((a, b), expected, strict=True))
    print(f"largest difference to one process: {difference:.1e}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["safe", "smart"], default="safe")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write the graph as Graphviz DOT")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
