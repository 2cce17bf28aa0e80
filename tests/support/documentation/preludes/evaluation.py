"""What docs/evaluation.md leaves to the reader."""

import torch
from support.documentation.things import loss_of, make_loader
from torch.utils.data import TensorDataset

import hvlike as hvd

torch.manual_seed(hvd.rank())
loader = make_loader(5)
torch.manual_seed(1)
test_data = TensorDataset(torch.randn(37, 8), torch.randint(3, (37,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))


def stop_now() -> bool:
    """Not yet."""
    return False
