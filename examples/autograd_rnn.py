"""A recurrent language model whose embedding and decoder live on other ranks.

    mpirun -n 2 python examples/autograd_rnn.py

Rank 0 reads the descriptions of data sets that come with scikit-learn, letter by letter, and learns to foretell the
next one. The tables that turn letters into vectors and vectors into guesses are the large parts of such models: they
live on other ranks (the embedding on rank 1, the decoder on the last one), the LSTM between them on rank 0. The
gradients of a piece of text flow from the loss through the decoder, the LSTM and the embedding, and one optimizer steps
all three where they are. With one rank, that rank owns everything.
"""

import argparse
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvlike as hvd
import hvlike.autograd as dist_autograd
from hvlike import rpc

State = tuple[Tensor, Tensor]


def main() -> None:
    """Join the job; rank 0 reads, the others serve their parts of the model."""
    options = parse_arguments()
    hvd.init()
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        learn(options)
    rpc.shutdown()
    hvd.shutdown()


class LanguageModel(nn.Module):
    """Letters in, guesses of the next letter out; only the LSTM is here."""

    def __init__(self, embedding_rank: int, decoder_rank: int, letters: int, options: argparse.Namespace) -> None:
        super().__init__()
        width, hidden = options.width, options.hidden
        self.embedding = rpc.RemoteModule(f"rank:{embedding_rank}", make_embedding, (letters, width, options.seed))
        self.lstm = nn.LSTM(width, hidden)
        self.decoder = rpc.RemoteModule(f"rank:{decoder_rank}", make_decoder, (hidden, letters, options.seed))

    def forward(self, text: Tensor, state: State | None) -> tuple[Tensor, State]:
        """(T, N) letters to (T, N, letters), with the state after the last one."""
        outputs, state = self.lstm(self.embedding(text), state)
        return self.decoder(outputs), state

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """References to all parameters, wherever they are."""
        here = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return [*self.embedding.remote_parameters(), *here, *self.decoder.remote_parameters()]


def make_embedding(letters: int, width: int, seed: int) -> nn.Module:
    """Runs where the embedding lives."""
    torch.manual_seed(seed)
    return nn.Embedding(letters, width)


def make_decoder(hidden: int, letters: int, seed: int) -> nn.Module:
    """Runs where the decoder lives."""
    torch.manual_seed(seed)
    return nn.Linear(hidden, letters)


def learn(options: argparse.Namespace) -> None:
    """Train on nine tenths of the text, and test on the rest after each epoch."""
    train_text, test_text, letters = read_text(options.columns)
    torch.manual_seed(options.seed)
    servers = list(range(1, hvd.size())) or [0]
    model = LanguageModel(servers[0], servers[-1], letters, options)
    print(f"the embedding is on rank {servers[0]}, the LSTM on rank 0, the decoder on rank {servers[-1]}")
    optimizer = rpc.DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=options.lr)
    print(f"before: test perplexity {test(model, test_text):.2f}", flush=True)
    for epoch in range(options.epochs):
        state = None
        for piece, following in pieces_of(train_text, options.steps):
            with dist_autograd.context() as context_id:
                guesses, state = model(piece, state)
                loss = functional.cross_entropy(guesses.flatten(0, 1), following.flatten())
                dist_autograd.backward(context_id, [loss], mode=options.mode)
                optimizer.step(context_id)
            # The next piece begins where this one has ended; its gradients do not go back further than to itself.
            state = (state[0].detach(), state[1].detach())
        print(f"epoch {epoch + 1}: test perplexity {test(model, test_text):.2f}", flush=True)


@torch.no_grad()
def test(model: LanguageModel, text: Tensor) -> float:
    """Among how many letters the model in effect still wavers; the number of letters if it knows nothing."""
    guesses, _ = model(text[:-1], None)
    return functional.cross_entropy(guesses.flatten(0, 1), text[1:].flatten()).exp().item()


def read_text(columns: int) -> tuple[Tensor, Tensor, int]:
    """Training text and test text, numbers of letters in several columns; and how many letters there are."""
    folder = files("sklearn.datasets.descr")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".rst"))
    text = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    alphabet = {letter: number for number, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([alphabet[letter] for letter in text])
    table = numbers[: len(numbers) // columns * columns].view(columns, -1).T.contiguous()
    end = len(table) * 9 // 10
    return table[:end], table[end:], len(alphabet)


def pieces_of(text: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Pieces of some steps, each with the letters that follow."""
    return [
        (text[start : start + steps], text[start + 1 : start + steps + 1])
        for start in range(0, len(text) - steps, steps)
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--columns", type=int, default=16, help="parts of the text that are read at the same time")
    parser.add_argument("--steps", type=int, default=32, help="letters between two steps of the optimizer")
    parser.add_argument("--width", type=int, default=32, help="length of a letter's vector")
    parser.add_argument("--hidden", type=int, default=96, help="units of the LSTM")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--mode", choices=["fast", "safe", "smart"], default="safe")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
