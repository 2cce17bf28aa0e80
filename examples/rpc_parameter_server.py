"""A parameter server: trainers send gradients, the server answers all of them with the parameters after one step.

    mpirun -n 3 python examples/rpc_parameter_server.py

Rank 0 owns the model; every other rank trains on its share of scikit-learn's 1 797 scanned digits. The server's method
is an `async_execution` function: it returns a future at once, and no thread of the server waits while gradients are
missing. The last trainer's gradient of a round completes the future of all. Rank 0 reads the data and sends each
trainer its share; in the end it trains the same model alone on whole batches and compares. With one rank, that rank is
also the only trainer.
"""

import argparse
import threading
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import functional

import hvlike as hvd
from hvlike import rpc


def main() -> None:
    """Join the job; rank 0 starts the training, the others serve until the end."""
    options = parse_arguments()
    hvd.init()
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        lead(options)
    rpc.shutdown()
    hvd.shutdown()


def lead(options: argparse.Namespace) -> None:
    """Start a trainer on every other rank, wait for all, and compare with a training in one process."""
    from digits import load_data

    train_set, test_set = load_data()
    trainers = list(range(1, hvd.size())) or [0]
    batches = cut_into_batches(train_set[:], options.batch_size * len(trainers))
    torch.manual_seed(options.seed)
    alone = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    server = rpc.RRef(ParameterServer(deepcopy(alone), trainers, options.lr))

    futures = []
    for position, trainer in enumerate(trainers):
        share = [(images[position :: len(trainers)], labels[position :: len(trainers)]) for images, labels in batches]
        futures.append(rpc.rpc_async(trainer, train, args=(server, trainer, share, options.epochs), timeout=0))
    losses = torch.tensor(torch.futures.wait_all(futures)).mean(dim=0)
    for epoch in sorted({0, options.epochs - 1}):
        print(f"epoch {epoch + 1}: loss {losses[epoch]:.4f}", flush=True)

    together = server.local_value().model
    print(f"test accuracy: {accuracy(together, *test_set[:]):.3f}")
    train_alone(alone, batches, options)
    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference to one process: {difference:.1e}", flush=True)


class ParameterServer:
    """The model and its optimizer; lives on rank 0, reached through an RRef."""

    def __init__(self, model: nn.Module, trainers: list[int], lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.gradients: dict[int, list[Tensor]] = {}
        self.answer: Future[list[Tensor]] = Future()

    def get_model(self) -> nn.Module:
        """The model as it is now; the caller gets a copy."""
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def exchange(server: rpc.RRef, trainer: int, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Hand in the gradients of one batch; the answer comes after the step with the average of all trainers."""
        self = server.local_value()
        with self.lock:
            answer = self.answer
            self.gradients[trainer] = gradients
            complete = len(self.gradients) == len(self.trainers)
            if complete:
                parameters = self.step()
                self.gradients, self.answer = {}, Future()
        # Completing a future sends the answers: not while the lock is held.
        if complete:
            answer.set_result(parameters)
        return answer

    def step(self) -> list[Tensor]:
        """Step with the averages, added up in the order of the trainers. Returns copies of the new parameters."""
        ordered = [self.gradients[trainer] for trainer in self.trainers]
        for parameter, *gradients in zip(self.model.parameters(), *ordered, strict=True):
            parameter.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def train(server: rpc.RRef, trainer: int, share: list[tuple[Tensor, Tensor]], epochs: int) -> list[float]:
    """Run on a trainer: compute gradients, exchange them for new parameters. Returns the mean loss of each epoch."""
    model = server.rpc_sync().get_model()
    losses = []
    for _ in range(epochs):
        total = 0.0
        for images, labels in share:
            loss = functional.cross_entropy(model(images), labels)
            gradients = list(torch.autograd.grad(loss, list(model.parameters())))
            fresh = rpc.rpc_sync(server.owner(), ParameterServer.exchange, args=(server, trainer, gradients))
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), fresh, strict=True):
                    parameter.copy_(value)
            total += loss.item()
        losses.append(total / len(share))
    return losses


def train_alone(model: nn.Module, batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> None:
    """The same training without RPC: one process, whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    for _ in range(options.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


def cut_into_batches(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of `size` images; those that do not fill a batch are left out."""
    images, labels = data
    return [
        (images[start : start + size], labels[start : start + size]) for start in range(0, len(labels) - size + 1, size)
    ]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images that the model names rightly."""
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="images per trainer and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
