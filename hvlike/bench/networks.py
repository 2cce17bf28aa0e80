"""Real networks for bench step: each maps a batch to its loss."""

from __future__ import annotations

from torch import Tensor, nn


class Perceptron(nn.Module):
    """`layers` square linear layers of `width` with ReLU between them; mean squared error."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for _ in range(layers):
            steps += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*steps[:-1])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: (batch, width). Returns the loss, a scalar."""
        loss: Tensor = nn.functional.mse_loss(self.layers(inputs), targets)
        return loss


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
