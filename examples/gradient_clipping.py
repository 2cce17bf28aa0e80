"""Clip gradients by their norm, after they were averaged over all ranks and before the optimizer uses them.

    mpirun -n 2 python examples/gradient_clipping.py
    mpirun -n 2 python examples/gradient_clipping.py --recipe explicit

A recurrent network reads each handwritten digit row by row. Clipping before the reduction would be wrong: each rank
would clip its own gradient by its own norm, and the average would be that of differently scaled gradients.
"""

import argparse

import torch
from digits import load_data
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd


class RowReader(nn.Module):
    """An LSTM over the eight rows of an image, then a linear layer over its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.LSTM(input_size=8, hidden_size=64, batch_first=True)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 1, 8, 8) images to (N, 10) logits."""
        states, _ = self.reader(images.squeeze(1))
        return self.classifier(states[:, -1])


def step_with_helper(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """The short recipe: the helper waits for the averaged gradients, clips them, and step() does not wait again."""
    norm = hvd.clip_grad_norm_(optimizer, max_norm)
    optimizer.step()
    return norm


def step_explicitly(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Horovod's recipe, for anything else that has to happen between the reduction and the step."""
    optimizer.synchronize()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    with optimizer.skip_synchronize():
        optimizer.step()
    return norm


def main() -> None:
    """Train for some epochs and print how often the norm was clipped."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, _ = load_data(device)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = RowReader().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    clipped_step = {"helper": step_with_helper, "explicit": step_explicitly}[options.recipe]

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        losses, norms = [], []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            norms.append(clipped_step(optimizer, options.max_norm))
            losses.append(loss.detach())
        loss = hvd.allreduce(torch.stack(losses).mean(), name="epoch loss").item()
        # The norm is that of the averaged gradient, so it is the same on every rank.
        clipped = torch.stack(norms) > options.max_norm
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: loss {loss:.4f}, clipped {int(clipped.sum())} of {len(clipped)} steps", flush=True
            )
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=["helper", "explicit"], default="helper")
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
