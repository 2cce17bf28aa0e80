"""A model cut into stages that live on different ranks and work on different parts of a batch at the same time.

    mpirun -n 3 python examples/rpc_pipeline.py

Rank r owns stage r. Rank 0 cuts each batch of scikit-learn's handwritten digits into micro-batches and starts the whole
step with calls that return at once: each names its input by an RRef, and the rank that runs it fetches the input from
the rank that made it. So activations go from stage to stage directly, and while one stage works on the first
micro-batch, the one before it is at the second. The gradients come back the same way, by RPC: each stage keeps its
inputs and outputs until the gradient of the output arrives. In the end rank 0 trains the whole model alone, and
compares. With one rank, that rank owns two stages.
"""

import argparse
import threading
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvlike as hvd
from hvlike import rpc


def main() -> None:
    """Join the job; rank 0 drives the training, the others serve until the end."""
    options = parse_arguments()
    hvd.init()
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        drive(options)
    rpc.shutdown()
    hvd.shutdown()


class Stage:
    """Some layers of the model with their optimizer; lives on one rank, reached through an RRef."""

    def __init__(self, layers: nn.Sequential, lr: float) -> None:
        self.layers = layers
        self.optimizer = torch.optim.SGD(layers.parameters(), lr, momentum=0.9)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.loss = 0.0
        # Gradients of several micro-batches arrive at the same time and are added up in the same parameters.
        self.lock = threading.Lock()

    def forward(self, number: int, source: rpc.RRef) -> Tensor:
        """Compute the output for a micro-batch."""
        inputs = source.to_here().requires_grad_()
        with self.lock:
            outputs = self.layers(inputs)
            self.kept[number] = inputs, outputs
            return outputs.detach()

    def backward(self, number: int, source: rpc.RRef) -> Tensor:
        """Take the gradient of a micro-batch's output. Returns that of its input."""
        gradient = source.to_here()
        with self.lock:
            inputs, outputs = self.kept.pop(number)
            outputs.backward(gradient)
            return inputs.grad

    def finish(self, source: rpc.RRef, labels: Tensor, batch_size: int) -> Tensor:
        """The last stage: output, loss and gradient in one call. Returns the gradient of the input."""
        inputs = source.to_here().requires_grad_()
        with self.lock:
            loss = functional.cross_entropy(self.layers(inputs), labels, reduction="sum") / batch_size
            loss.backward()
            self.loss += loss.item()
            return inputs.grad

    def step(self) -> float:
        """Take the step of this stage after the last micro-batch. Returns the loss; 0 unless this is the last stage."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, self.loss = self.loss, 0.0
        return loss

    def get_layers(self) -> nn.Sequential:
        """A copy of the layers, for the caller."""
        return self.layers


def drive(options: argparse.Namespace) -> None:
    """Create the stages, train them, and compare with the whole model in one process."""
    from digits import load_data

    train_set, test_set = load_data()
    images, labels = (each[: len(train_set) // options.batch_size * options.batch_size] for each in train_set[:])
    images = images.double()
    batches = list(zip(images.split(options.batch_size), labels.split(options.batch_size), strict=True))

    layers, count = build_layers(options.seed), max(2, hvd.size())
    cuts = [len(layers) * cut // count for cut in range(count + 1)]
    parts = [layers[start:end] for start, end in pairwise(cuts)]
    stages = [rpc.remote(rank % hvd.size(), Stage, args=(part, options.lr)) for rank, part in enumerate(parts)]
    for epoch in range(options.epochs):
        losses = [train_batch(stages, *batch, options.micro_batches) for batch in batches]
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}", flush=True)

    trained = [stage.rpc_sync().get_layers() for stage in stages]
    pipeline = nn.Sequential(*[layer for part in trained for layer in part])
    test_images, test_labels = test_set[:]
    correct = pipeline(test_images.double()).argmax(dim=1) == test_labels
    print(f"stages: {[len(part) for part in trained]} layers")
    print(f"test accuracy: {correct.double().mean():.3f}")
    pairs = zip(pipeline.parameters(), train_alone(layers, batches, options).parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference to one process: {difference:.1e}", flush=True)


def train_batch(stages: list[rpc.RRef], images: Tensor, labels: Tensor, micro_batches: int) -> float:
    """One step of all stages. Returns the loss."""
    *front, last = stages
    ends = []
    parts = zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
    for number, (part, part_labels) in enumerate(parts):
        value = rpc.RRef(part)
        for stage in front:
            value = stage.remote().forward(number, value)
        value = last.remote().finish(value, part_labels, len(labels))
        for stage in reversed(front):
            value = stage.remote().backward(number, value)
        ends.append(value)
    # Nothing has waited so far. The gradient of the first stage's input is there when all the others are.
    for end in ends:
        end.to_here()
    return sum(torch.futures.wait_all([stage.rpc_async().step() for stage in stages]))


def train_alone(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> nn.Sequential:
    """The same training in one process, without stages and micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    for _ in range(options.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def build_layers(seed: int) -> nn.Sequential:
    """The whole model; double precision makes the comparison sharp."""
    torch.manual_seed(seed)
    widths = [64, 128, 96, 64, 32]
    layers: list[nn.Module] = [nn.Flatten()]
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10)).double()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
