"""What the pages leave to the reader: a small model, some data, a loss."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class Net(torch.nn.Module):
    """Eight numbers to three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Of shape (N, 8) to (N, 3)."""
        output: Tensor = self.layers(images)
        return output


def make_loader(batches: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Some batches of four."""
    return [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(batches)]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy."""
    return cross_entropy(output, labels)
