"""Train on after errors of the job: every rank goes back to the last commit, and hvlike starts again in the same job.

    mpirun -n 2 python examples/elastic.py --fail-at 25

At the step of `--fail-at` the last rank loses heart, once. All ranks return to their last commit, the sampler hands
out what was not processed by then, and the result is that of a run without the error.
"""

import argparse

import torch
from digits import build_model, load_data
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hvlike as hvd


def main() -> None:
    """Train, fail where that is asked for, and say how it went."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    device = hvd.pin_device(options.device)
    train_set, test_set = load_data(device)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_set, seed=options.seed)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, losses=[])
    state.register_reset_callbacks([lambda: say(f"starting again from step {state.step}")])
    trouble = Trouble(options.fail_at)

    train(state, train_set, options, trouble)
    say(f"{state.step} steps, loss of the last epoch {sum(state.losses) / len(state.losses):.4f}")
    say(f"test accuracy: {test(state.model, test_set):.3f}")
    hvd.shutdown()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, train_set: Dataset, options: argparse.Namespace, trouble: "Trouble") -> None:
    """Train from wherever the state says; called again after an error."""
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=state.sampler)
    state.model.train()
    while state.epoch < options.epochs:
        for batch, (images, labels) in enumerate(loader):
            # Dropout draws the same when a step is repeated.
            torch.manual_seed(options.seed + state.step * hvd.size() + hvd.rank())
            state.optimizer.zero_grad()
            loss = functional.cross_entropy(state.model(images), labels)
            loss.backward()
            trouble.may_come(state.step)
            state.optimizer.step()
            state.losses.append(hvd.allreduce(loss.detach(), name="loss").item())
            state.sampler.record_batch(batch, options.batch_size)
            state.step += 1
            if state.step % options.commit_every == 0:
                state.commit()
        state.epoch += 1
        if state.epoch < options.epochs:
            state.losses = []
            state.sampler.set_epoch(state.epoch)
        state.commit()


class Trouble:
    """An error of the job, on the last rank, once."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def may_come(self, step: int) -> None:
        """Raise at the step that was asked for."""
        if step == self._step:
            self._step = None
            if hvd.rank() == hvd.size() - 1:
                raise hvd.HorovodInternalError(f"trouble at step {step}")


@torch.no_grad()
def test(model: torch.nn.Module, test_set: Dataset) -> float:
    """Test each image on one rank. Returns the accuracy on all of them."""
    model.eval()
    images, labels = test_set[hvd.rank() :: hvd.size()]
    correct = (model(images).argmax(dim=1) == labels).sum()
    return hvd.allreduce(correct, name="correct", op=hvd.Sum).item() / len(test_set)


def say(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank")
    parser.add_argument("--commit-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="the step at which the last rank fails")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
