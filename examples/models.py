"""Residual networks (He et al., 2015) for the benchmark; the same layers and sizes as the published ones."""

from torch import Tensor, nn


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image size (but for the stride), and its batch normalization."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Adds its input to what `body` makes of it; a projection fits the input where the sizes differ."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return nn.functional.relu(self.body(images) + self.shortcut(images))


def basic_block(inputs: int, width: int, stride: int) -> Residual:
    """Two 3 x 3 convolutions; `width` channels come out."""
    body = nn.Sequential(convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3))
    return Residual(body, inputs, width, stride)


def bottleneck_block(inputs: int, width: int, stride: int) -> Residual:
    """1 x 1 down, 3 x 3, 1 x 1 up; four times `width` channels come out."""
    body = nn.Sequential(
        convolution(inputs, width, 1),
        nn.ReLU(),
        convolution(width, width, 3, stride),
        nn.ReLU(),
        convolution(width, 4 * width, 1),
    )
    return Residual(body, inputs, 4 * width, stride)


def residual_network(block, expansion: int, depths: tuple[int, ...], classes: int = 1000) -> nn.Sequential:
    """A stem, four stages of `depths` blocks that halve the image and double the width, and a classifier."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(block(channels, width, stride))
            channels = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet18() -> nn.Sequential:
    """11.7 million parameters in 62 tensors."""
    return residual_network(basic_block, 1, (2, 2, 2, 2))


def resnet50() -> nn.Sequential:
    """25.6 million parameters in 161 tensors."""
    return residual_network(bottleneck_block, 4, (3, 4, 6, 3))


MODELS = {"resnet18": resnet18, "resnet50": resnet50}


if __name__ == "__main__":
    raise SystemExit("No program of its own. Run synthetic_benchmark.py, which imports it.")
