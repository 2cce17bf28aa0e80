"""ResNet-50 (He et al., 2015) for bench step on a GPU: images to the loss; the same layers as the published one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

_DEPTHS = (3, 4, 6, 3)
_EXPANSION = 4


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


class ResNet50(nn.Module):
    """25.6 million parameters in 161 tensors; cross entropy."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for stage, depth in enumerate(_DEPTHS):
            width = 64 << stage
            for position in range(depth):
                layers.append(Bottleneck(channels, width, 2 if stage and not position else 1))
                channels = width * _EXPANSION
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: (batch, 3, H, W); labels: (batch) int64. Returns the loss, a scalar."""
        return functional.cross_entropy(self.layers(images), labels)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]
