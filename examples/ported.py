# Written for horovod.torch; only the import line differs: it was `import horovod.torch as hvd`.
"""Handwritten digits as a Horovod program trains them.

mpirun -n 2 python examples/ported.py --fp16-allreduce
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvlike as hvd

parser = argparse.ArgumentParser(description="Digits with Horovod's calls")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--test-batch-size", type=int, default=180)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--base-lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--uneven", action="store_true", help="give the last rank less data and end with join()")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--save", default="", help="file to write the model to, on rank 0")


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def load_datasets():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(args, model, optimizer, train_sampler, train_loader, epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(args.device), target.to(args.device)
        if args.uneven and hvd.rank() == hvd.size() - 1 and batch_idx == len(train_loader) // 2:
            break
        optimizer.zero_grad()
        # Parts of the batch whose gradients are added up before they are averaged over the ranks.
        for i in range(0, len(data), args.batch_size):
            part = F.nll_loss(model(data[i : i + args.batch_size]), target[i : i + args.batch_size])
            part.div(math.ceil(len(data) / args.batch_size)).backward()
        optimizer.step()
    if args.uneven:
        hvd.join()


def test(args, model, test_sampler, test_loader):
    model.eval()
    loss = accuracy = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(args.device), target.to(args.device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            accuracy += (output.argmax(dim=1) == target).float().sum().item()
    loss = metric_average(loss / len(test_sampler), "avg_loss")
    accuracy = metric_average(accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    if args.device == "cuda":
        # One GPU for each local rank.
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    train_dataset, test_dataset = load_datasets()
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_dataset, batch_size=args.test_batch_size, sampler=test_sampler)

    model = Net().to(args.device)
    lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train(args, model, optimizer, train_sampler, train_loader, epoch)
        test(args, model, test_sampler, test_loader)

    if args.save and hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
