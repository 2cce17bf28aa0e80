"""The models of bench step: what is trained, on what batch. Random data, pure torch, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvlike.bench.networks import Perceptron, Transformer
from hvlike.bench.residual import ResNet50
from hvlike.bench.shaped import Shaped
from hvlike.bench.shapes import Shape, bert, resnet_50, small

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """One model. `build` draws its weights and `batch` its data from torch's global generator."""

    name: str
    purpose: str
    build: Callable[[], nn.Module]
    """Returns a module that maps a batch to its loss."""
    batch: Callable[[], Batch]
    device: torch.device | str = "cpu"
    """Where both are; drawn on the CPU, so the same everywhere."""

    def model(self, seed: int) -> nn.Module:
        """Return the model with weights that depend on the seed alone."""
        torch.manual_seed(seed)
        return self.build().to(self.device)

    def data(self, seed: int) -> Batch:
        """Return a batch that depends on the seed alone."""
        torch.manual_seed(seed)
        return tuple(each.to(self.device) for each in self.batch())


def _perceptron(name: str, purpose: str, width: int, layers: int, batch: int) -> Workload:
    return Workload(
        name,
        purpose,
        lambda: Perceptron(width, layers),
        lambda: (torch.randn(batch, width), torch.randn(batch, width)),
    )


def _transformer(name: str, purpose: str, width: int, layers: int, batch: int, length: int) -> Workload:
    vocabulary = 512
    return Workload(
        name,
        purpose,
        lambda: Transformer(width, layers, vocabulary, length),
        lambda: (torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))),
    )


def _shaped(name: str, purpose: str, shapes: Sequence[Shape]) -> Workload:
    return Workload(name, purpose, lambda: Shaped(shapes), lambda: (torch.randn(Shaped.longest(shapes)),))


_CHEAP = "gradients by one elementwise operation each"

WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        _perceptron("mlp", "four layers of 2048 x 2048, batch 64", 2048, 4, 64),
        _transformer("transformer", "width 256, 4 layers, batch 8 x 64 tokens", 256, 4, 8, 64),
        _perceptron("small", "eight layers of 256 x 256, batch 32", 256, 8, 32),
        _shaped("tensors400", f"400 tensors of 1 to 16 KiB; {_CHEAP}", small(400)),
        _shaped("resnet", f"ResNet-50's shapes; {_CHEAP}", resnet_50()),
        _shaped("bert", f"BERT-base's shapes; {_CHEAP}", bert(768, 12)),
        _shaped("bert400", f"BERT-large's 391 tensors at a quarter of its width; {_CHEAP}", bert(256, 24)),
    )
}
LARGE: dict[str, Workload] = {
    "resnet50": Workload(
        "resnet50",
        "ResNet-50 itself, batch 32 x 3 x 224 x 224: meant for a GPU, a step takes a CPU many seconds",
        ResNet50,
        lambda: (torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))),
    )
}
"""Measured when they are asked for by name."""

DEFAULT = ("mlp", "transformer", "small", "tensors400", "resnet")
