"""DistributedDataParallel and ZeroRedundancyOptimizer on ranks that have different numbers of inputs.

    mpirun -n 2 python examples/uneven_zero.py

Rank r has 5 + r inputs. The optimizer's state is spread over the ranks: each updates its share of the parameters and
goes on doing so, inside the Join context, when it has no inputs any more. In the end all ranks hold the same.
"""

import argparse

import torch

import hvlike as hvd
from hvlike.join import Join
from hvlike.nn import DistributedDataParallel
from hvlike.optim import ZeroRedundancyOptimizer

NUM_INPUTS = 5


def main() -> None:
    """Train, and show that nothing is left apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    device = hvd.pin_device(options.device)
    layers = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    inputs = [torch.tensor([1.0], device=device) for _ in range(NUM_INPUTS + hvd.rank())]
    num_inputs = 0
    with Join([model, optimizer]):
        for each in inputs:
            num_inputs += 1
            optimizer.zero_grad()
            model(each).sum().backward()
            optimizer.step()

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    # Who owns a parameter has counted its steps: as many as the rank with most inputs has made.
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    everybody = hvd.allgather_object((num_inputs, steps, len(optimizer.state)))
    apart = float((hvd.allreduce(flat, op=hvd.Max) - hvd.allreduce(flat, op=hvd.Min)).max())
    if hvd.rank() == 0:
        for rank, (count, made, owned) in enumerate(everybody):
            print(
                f"Rank {rank} has exhausted all {count} of its inputs! "
                f"It owns {owned} of 4 parameters and has updated them {made} times."
            )
        print(f"largest difference between ranks: {apart}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
