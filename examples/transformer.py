"""A small transformer that foretells the next letter of a text, for the examples that share it out among ranks."""

from collections.abc import Iterator
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS = 12  # Any of 1, 2, 3, 4, 6 and 12 ranks can share them
WIDTH = 48
LENGTH = 32


class Attention(nn.Module):
    """Each letter looks at those before it. Of the heads it computes as many as its projections yield."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, T, width) to the same shape."""
        parts = (project(hidden) for project in (self.query, self.key, self.value))
        heads = [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two layers for each letter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, T, width) to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Embedding(nn.Module):
    """What a letter is, and where it stands."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        """(N, T) to (N, T, width)."""
        return self.letters(text) + self.places(torch.arange(text.shape[1]))


def build_transformer(letters: int, depth: int, seed: int) -> nn.Sequential:
    """(N, T) letters to logarithms of probabilities, (N, T, letters); double precision makes comparisons sharp."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters), nn.LogSoftmax(dim=-1))
    return nn.Sequential(Embedding(letters), *(Block() for _ in range(depth)), head).double()


def loss_of(guesses: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy of (N, T, letters) against (N, T)."""
    return functional.nll_loss(guesses.flatten(0, 1), following.flatten())


class Text:
    """The descriptions of data sets that come with scikit-learn, as numbers of letters."""

    def __init__(self) -> None:
        folder = files("sklearn.datasets.descr")
        text = "".join(each.read_text() for each in sorted(folder.iterdir(), key=str) if each.name.endswith(".rst"))
        numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
        self.letters = len(numbers)
        self._text = torch.tensor([numbers[letter] for letter in text])

    def batches(self, steps: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the text, and the letters that follow: the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self._text) - LENGTH, (size,), generator=generator)
            pieces = self._text[starts[:, None] + torch.arange(LENGTH + 1)]
            yield pieces[:, :-1], pieces[:, 1:]


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """What one process does with the whole batches."""
    for text, following in batches:
        optimizer.zero_grad()
        loss_of(model(text), following).backward()
        optimizer.step()


if __name__ == "__main__":
    raise SystemExit("No program of its own. Run fsdp2.py, tensor_parallel.py or pipeline.py, which import it.")
