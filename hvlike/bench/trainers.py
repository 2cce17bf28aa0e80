"""The training steps of bench step: models, batches, ways to train, and the check that they compute the same.

Random data, pure torch, nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvlike
from hvlike.bench.harness.benchmark import settle
from hvlike.bench.harness.raw_mpi import RawMpi
from hvlike.bench.reducers import BARE, EXCHANGE, BareLoop, raw_exchange
from hvlike.errors import HvlikeError
from hvlike.nn import DistributedDataParallel

_DEPTHS = (3, 4, 6, 3)
_EXPANSION = 4
Shape = tuple[int, ...]
Batch = tuple[Tensor, ...]
_VOCABULARY = 512
_CHEAP = "gradients by one elementwise operation each"
DEFAULT = ("mlp", "transformer", "small", "tensors400", "resnet")
ALONE, OURS, OURS_DDP = "no communication", "hvlike", "hvlike DDP"
_TOLERANCE = 1e-4  # Of sums of a few ranks' float32 values in different orders
_LEARNING_RATE = 1e-4  # Small enough that hundreds of steps on random data stay finite


class WithLoss(nn.Module):
    """A network and the loss of what it computes."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.network(inputs), targets)


def perceptron(width: int, layers: int) -> WithLoss:
    """`layers` square linear layers of `width` with ReLU between them; mean squared error."""
    steps = [step for _ in range(layers) for step in (nn.Linear(width, width), nn.ReLU())]
    return WithLoss(nn.Sequential(*steps[:-1]), functional.mse_loss)


class Transformer(nn.Module):
    """A small language model: embeddings, encoder layers with causal attention, a head; cross entropy."""

    def __init__(self, width: int, layers: int, vocabulary: int, length: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        # Without dropout: all contestants are to compute the same gradients.
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (batch, length) int64. Returns the loss, a scalar."""
        hidden = self.tokens(tokens) + self.positions.weight
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up, added to the input or to what a projection makes of it."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, outputs, 1, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, 4 width, H / stride, W / stride)."""
        return functional.relu(self.body(images) + self.shortcut(images))


def resnet50(classes: int = 1000) -> WithLoss:
    """25.6 million parameters in 161 tensors; cross entropy. Of images, (batch, 3, H, W), and int64 labels."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for stage, depth in enumerate(_DEPTHS):
        width = 64 << stage
        for position in range(depth):
            layers.append(Bottleneck(channels, width, 2 if stage and not position else 1))
            channels = width * _EXPANSION
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return WithLoss(nn.Sequential(*layers), functional.cross_entropy)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


def resnet_50() -> list[Shape]:
    """161 tensors, 25 557 032 elements."""
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in resnet50().parameters()]


def bert(width: int, layers: int) -> list[Shape]:
    """The encoder with its pooler (Devlin et al. 2019): 16 tensors a layer and 7. BERT-base is bert(768, 12)."""
    norm: list[Shape] = [(width,), (width,)]
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), *norm]
    for _ in range(layers):
        for _ in ("query", "key", "value", "output"):
            shapes += [(width, width), (width,)]
        shapes += [*norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm]
    return [*shapes, (width, width), (width,)]


def small(count: int) -> list[Shape]:
    """`count` tensors of 1, 2, 4, 8 and 16 KiB of float32 in turn."""
    return [(256 << index % 5,) for index in range(count)]


class Shaped(nn.Module):
    """The loss is the sum of the parameters' inner products with the batch.

    Nearly nothing to hide communication behind, and the last parameter's gradient comes first, as in a real network.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, values: Tensor) -> Tensor:
        loss = torch.zeros(())
        for weight in self.weights:
            loss = loss + torch.dot(weight.flatten(), values[: weight.numel()])
        return loss


@dataclass(frozen=True)
class Workload:
    """One model. `build` draws its weights and `batch` its data from torch's global generator."""

    name: str
    purpose: str
    build: Callable[[], nn.Module]  # Returns a module that maps a batch to its loss
    batch: Callable[[], Batch]
    device: torch.device | str = "cpu"  # Where both are; drawn on the CPU, so the same everywhere

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().to(self.device)

    def data(self, seed: int) -> Batch:
        torch.manual_seed(seed)
        return tuple(each.to(self.device) for each in self.batch())


def _perceptron(name: str, purpose: str, width: int, layers: int, batch: int) -> Workload:
    return Workload(name, purpose, partial(perceptron, width, layers), lambda: tuple(torch.randn(2, batch, width)))


def shaped(name: str, purpose: str, shapes: Sequence[Shape]) -> Workload:
    """A model of parameters of these shapes whose gradients cost nearly nothing."""
    longest = max(math.prod(shape) for shape in shapes)
    return Workload(name, purpose, lambda: Shaped(shapes), lambda: (torch.randn(longest),))


WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        _perceptron("mlp", "four layers of 2048 x 2048, batch 64", 2048, 4, 64),
        Workload(
            "transformer",
            "width 256, 4 layers, batch 8 x 64 tokens",
            lambda: Transformer(256, 4, _VOCABULARY, 64),
            lambda: tuple(torch.randint(_VOCABULARY, (2, 8, 64))),
        ),
        _perceptron("small", "eight layers of 256 x 256, batch 32", 256, 8, 32),
        shaped("tensors400", f"400 tensors of 1 to 16 KiB; {_CHEAP}", small(400)),
        shaped("resnet", f"ResNet-50's shapes; {_CHEAP}", resnet_50()),
        shaped("bert", f"BERT-base's shapes; {_CHEAP}", bert(768, 12)),
        shaped("bert400", f"BERT-large's 391 tensors at a quarter of its width; {_CHEAP}", bert(256, 24)),
        Workload(
            "resnet50",
            "ResNet-50 itself, batch 32 x 3 x 224 x 224: meant for a GPU, a step takes a CPU many seconds",
            resnet50,
            lambda: (torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))),
        ),
    )
}


class BenchTrainer:
    """A model, its optimizer and a batch. A step is: zero_grad, forward, backward, optimizer.step()."""

    def __init__(self, name: str, workload: Workload, seed: int, rank: int) -> None:
        self.name = name
        self.device = torch.device(workload.device)
        self.model = workload.model(seed)
        self.batch = workload.data(seed + 1 + rank)
        self.network: Callable[..., Any] = self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(*self.batch).backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        """Train `count` times on the batch; a GPU is done with it then."""
        for _ in range(count):
            self.step()
        settle(self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def gradients(self) -> list[Tensor | None]:
        return [each.grad for each in self.parameters]

    def weights(self) -> list[Tensor]:
        return [each.detach() for each in self.parameters]

    def checksum(self) -> float:
        """Return a number that is the same for replicas whose weights are equal bit for bit."""
        return float(sum(each.double().sum() for each in self.weights()))

    def verify_gradients(self, expected: list[Tensor], rank: int) -> None:
        """Compare the gradients that the first step has left with the expected ones. Raises: HvlikeError."""
        for index, (found, right) in enumerate(zip(self.gradients(), expected, strict=True)):
            # Relative to the largest element: small ones are what large ones leave when they cancel.
            allowed = _TOLERANCE * float(right.abs().max())
            if found is None or not torch.allclose(found, right, rtol=0.0, atol=allowed):
                raise HvlikeError(
                    f"rank {rank}: {self.name} did not leave the mean gradient in parameter {index} "
                    f"of shape {tuple(right.shape)}."
                )

    def verify_replicas(self, raw: RawMpi) -> None:
        """Check that all ranks have trained to the same weights. Collective. Raises: HvlikeError on every rank."""
        mine = self.checksum()
        highest, lowest = raw.maximum([mine, -mine])
        if highest != -lowest:
            raise HvlikeError(f"{self.name} left different weights on different ranks: {-lowest} to {highest}.")


class BareTrainer(BenchTrainer):
    """Averages the gradients after backward by a bare loop: communication without a library."""

    def __init__(self, workload: Workload, seed: int, rank: int, bare: BareLoop) -> None:
        super().__init__(BARE, workload, seed, rank)
        self._bare = bare

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(*self.batch).backward()
        gradients = [each.grad.view(-1).numpy() for each in self.model.parameters() if each.grad is not None]
        self._bare.reduce(self._bare.chunks(gradients), 1 / hvlike.size())
        self.optimizer.step()


class ExchangeTrainer(BenchTrainer):
    """Sends and receives as many bytes as its gradients have, and averages nothing."""

    def __init__(self, workload: Workload, seed: int, rank: int, exchange: Callable[[], None]) -> None:
        super().__init__(EXCHANGE, workload, seed, rank)
        self._exchange = exchange

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(*self.batch).backward()
        self._exchange()
        self.optimizer.step()

    def verify_gradients(self, expected: list[Tensor], rank: int) -> None:
        """There is no mean."""

    def verify_replicas(self, raw: RawMpi) -> None:
        """They drift apart."""


def contestants(
    workload: Workload, seed: int, raw: RawMpi, backend: str | None, bucket_view: bool, bare: BareLoop | None
) -> list[BenchTrainer]:
    """Return those who train, first the one without communication. Collective.

    backend: of torch's default process group, if there is one. bucket_view: its DDP with gradient_as_bucket_view, too.
    """
    rank = raw.rank
    _, ours, ours_ddp = entered = [BenchTrainer(name, workload, seed, rank) for name in (ALONE, OURS, OURS_DDP)]
    # As users wrap them.
    named = ours.model.named_parameters()
    ours.optimizer = hvlike.DistributedOptimizer(ours.optimizer, named_parameters=named)
    ours_ddp.network = DistributedDataParallel(ours_ddp.model)
    for view in [] if backend is None else [False, True][: 1 + bucket_view]:
        ddp = BenchTrainer(f"DDP-{backend}{' view' * view}", workload, seed, rank)
        parallel: Any = torch.nn.parallel.DistributedDataParallel
        ddp.network = parallel(ddp.model, gradient_as_bucket_view=view)
        entered.append(ddp)
    exchange = raw_exchange(raw, sum(each.nbytes for each in ours.parameters))
    if exchange is not None and ours.device.type == "cpu":
        entered.append(ExchangeTrainer(workload, seed, rank, exchange))
    return entered if bare is None else [*entered, BareTrainer(workload, seed, rank, bare)]


def expected_gradients(model: nn.Module, batch: Batch, raw: RawMpi) -> list[Tensor]:
    """Return the means over ranks of the gradients of a model before its first step, by plain MPI. Collective."""
    model(*batch).backward()
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is None:
            raise HvlikeError("A model of the benchmark has a parameter without a gradient.")
        mean = parameter.grad.cpu()
        raw.allreduce(mean.numpy())
        gradients.append(mean.div_(raw.size).to(parameter.device))
    return gradients
