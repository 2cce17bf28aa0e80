"""Shapes of the parameters of well-known networks, in the order of their modules, for bench step."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet_50() -> list[Shape]:
    """161 tensors, 25 557 032 elements. Source: He et al. 2016, with torchvision's stride and classifier."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            convolutions = [(width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1)]
            if block == 0:
                convolutions.append((outputs, inputs, 1, 1))
            for convolution in convolutions:
                # Each is followed by a batch normalisation.
                shapes += [convolution, (convolution[0],), (convolution[0],)]
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def bert(width: int, layers: int) -> list[Shape]:
    """The encoder with its pooler: 16 tensors a layer and 7. BERT-base: bert(768, 12), 199 tensors.

    Source: Devlin et al. 2019; vocabulary of 30 522 tokens, 512 positions.
    """
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
