"""One model, two kinds of parallelism: a large table of vectors on one rank, copies of the dense layers on all others.

    mpirun -n 4 python examples/autograd_hybrid.py

Each of the 64 pixels of scikit-learn's handwritten digits has one of 17 shades: an image is a bag of 64 of 1 088 words.
Rank 0 owns the table that has a vector for each word, too large to be copied in models of this kind. The other ranks
are trainers: each has a copy of the dense layers in a DistributedDataParallel and a share of every batch, and asks rank
0 for the vectors that it needs. One distributed backward leaves in a trainer's context the gradients of its copy,
averaged over the trainers, and with rank 0 sparse gradients of the few rows that were used; optimizers over RRefs step
both. In the end rank 0 trains the same model alone on whole batches, and compares. With one rank, that rank is also the
only trainer.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvlike as hvd
import hvlike.autograd as dist_autograd
from hvlike import rpc
from hvlike.nn import DistributedDataParallel

SHADES = 17

Batches = list[tuple[Tensor, Tensor]]


def main() -> None:
    """Join the job; rank 0 starts the training, the others train when they are asked to."""
    options = parse_arguments()
    hvd.init(process_sets="dynamic")
    ranks = list(range(1, hvd.size()))
    trainers = hvd.add_process_set(ranks) if ranks else hvd.global_process_set
    rpc.init_rpc(f"worker{hvd.rank()}")
    if hvd.rank() == 0:
        lead(options, trainers)
    rpc.shutdown()
    hvd.shutdown()


def lead(options: argparse.Namespace, trainers: hvd.ProcessSet) -> None:
    """Make the table, start all trainers, and compare with a training in one process."""
    train_words, test_words = load_words()
    count = len(trainers.ranks)
    batches = cut_into_batches(*train_words, options.batch_size * count)
    table = rpc.RemoteModule("rank:0", make_table, (options.width, options.seed))
    futures = []
    for place, rank in enumerate(trainers.ranks):
        share = [(words[place::count], labels[place::count]) for words, labels in batches]
        futures.append(rpc.rpc_async(rank, train, args=(trainers, table, share, options), timeout=0))
    results = torch.futures.wait_all(futures)
    losses = torch.tensor([each for each, _ in results]).mean(dim=0)
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)

    together = nn.Sequential(table.get_module_rref().local_value(), results[0][1])
    words, labels = test_words
    with torch.no_grad():
        accuracy = (together(words).argmax(dim=1) == labels).double().mean().item()
    print(f"{count} trainer(s), test accuracy: {accuracy:.3f}")
    print(f"largest difference between trainers: {max(difference(results[0][1], dense) for _, dense in results):.1e}")
    print(f"largest difference to one process: {difference(together, train_alone(batches, options)):.1e}", flush=True)


def train(
    trainers: hvd.ProcessSet, table: rpc.RemoteModule, share: Batches, options: argparse.Namespace
) -> tuple[list[float], nn.Module]:
    """Run on every trainer at the same time. Returns the mean loss of each epoch, and the dense layers."""
    dense = DistributedDataParallel(make_dense(options.width, options.seed), process_set=trainers)
    parameters = [rpc.RRef(parameter) for parameter in dense.parameters()]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=options.lr, momentum=0.9)
    # Every trainer steps the table with its own gradients: each by its part, which gives the average of all.
    part = options.table_lr / len(trainers.ranks)
    table_optimizer = rpc.DistributedOptimizer(torch.optim.SGD, table.remote_parameters(), lr=part)
    losses = []
    for _ in range(options.epochs):
        total = 0.0
        for words, labels in share:
            with dist_autograd.context() as context_id:
                loss = functional.cross_entropy(dense(table(words)), labels)
                # Averages over the trainers, so it ends when all have come so far: none still needs the old rows.
                dist_autograd.backward(context_id, [loss], mode=options.mode)
                optimizer.step(context_id)
                table_optimizer.step(context_id)
            # None asks for new rows before all have stepped.
            hvd.barrier(process_set=trainers)
            total += loss.item()
        losses.append(total / len(share))
    return losses, dense.module


def train_alone(batches: Batches, options: argparse.Namespace) -> nn.Sequential:
    """The same training in one process, on whole batches."""
    table, dense = make_table(options.width, options.seed), make_dense(options.width, options.seed)
    model = nn.Sequential(table, dense)
    optimizers = [
        torch.optim.SGD(table.parameters(), options.table_lr),
        torch.optim.SGD(dense.parameters(), options.lr, momentum=0.9),
    ]
    for _ in range(options.epochs):
        for words, labels in batches:
            model.zero_grad()
            functional.cross_entropy(model(words), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
    return model


def make_table(width: int, seed: int) -> nn.Module:
    """A vector for each word; (N, 64) words to (N, width) means. Double precision makes the comparison sharp."""
    values = torch.randn(64 * SHADES, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return nn.EmbeddingBag.from_pretrained(values, freeze=False, mode="mean", sparse=True)


def make_dense(width: int, seed: int) -> nn.Module:
    """What follows the table; the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def load_words() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Words and labels for training and for testing."""
    from digits import load_data

    pairs = []
    for data in load_data():
        images, labels = data[:]
        shades = (images.flatten(1) * (SHADES - 1)).round().long()
        pairs.append((torch.arange(64) * SHADES + shades, labels))
    return pairs[0], pairs[1]


def cut_into_batches(words: Tensor, labels: Tensor, size: int) -> Batches:
    """Batches of `size` images; those that do not fill a batch are left out."""
    end = len(labels) // size * size
    return list(zip(words[:end].split(size), labels[:end].split(size), strict=True))


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference between parameters of two modules."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="images per trainer and step")
    parser.add_argument("--width", type=int, default=32, help="length of a word's vector")
    parser.add_argument("--lr", type=float, default=0.2, help="of the dense layers")
    parser.add_argument("--table-lr", type=float, default=50.0)
    parser.add_argument("--mode", choices=["fast", "safe", "smart"], default="safe")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
