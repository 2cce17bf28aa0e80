"""Train on after the loss of a rank: one of them kills itself, the others go on, and a picture shows what it cost.

    mpirun --with-ft ulfm -n 3 python examples/survive.py --die-at 25 --output survive.png
    HVLIKE_SPARES=1 mpirun --with-ft ulfm -n 4 python examples/survive.py --die-at 25 --output survive.png

In the first job two ranks are left and go on from their last commit. In the second a process that waited until then
takes the place of the lost one: the losses are those of a run in which nothing has happened. Open MPI 5 only.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from digits import build_model, load_data
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hvlike as hvd


def main() -> None:
    """Train, lose a rank, and draw the losses."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    train_set, _ = load_data(torch.device("cpu"))
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_set, seed=options.seed)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, losses=[], restarts=[]
    )

    def on_reset() -> None:
        # Of a lost process only the others can tell: from where they go on, and how many they are.
        state.restarts = [*state.restarts, (state.step, hvd.size())]

    state.register_reset_callbacks([on_reset])
    train(state, train_set, options)
    if hvd.rank() == 0:
        for step, ranks in state.restarts:
            print(f"a rank was lost: {ranks} ranks went on from step {step}")
        print(f"{state.step} steps, last loss {state.losses[-1]:.4f}", flush=True)
        if options.output:
            draw(options.output, state.losses, state.restarts)
    hvd.shutdown()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, train_set: Dataset, options: argparse.Namespace) -> None:
    """Train from wherever the state says; called again after a loss, by whom is left."""
    for group in state.optimizer.param_groups:
        group["lr"] = options.lr * hvd.size()
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=state.sampler)
    while state.epoch < options.epochs:
        for batch, (images, labels) in enumerate(loader):
            # Dropout draws the same when a step is repeated.
            torch.manual_seed(options.seed + state.step * 1000 + hvd.rank())
            state.optimizer.zero_grad()
            loss = functional.cross_entropy(state.model(images), labels)
            loss.backward()
            if state.step == options.die_at and hvd.rank() == options.die_rank and not state.restarts:
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.step()
            state.losses = [*state.losses, hvd.allreduce(loss.detach(), name="loss").item()]
            state.sampler.record_batch(batch, options.batch_size)
            state.step += 1
            if state.step % options.commit_every == 0:
                state.commit()
        state.epoch += 1
        if state.epoch < options.epochs:
            state.sampler.set_epoch(state.epoch)
        state.commit()


def draw(path: Path, losses: list[float], restarts: list[tuple[int, int]]) -> None:
    """Write a picture of the loss over the steps, with the steps from which the job went on after a loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", label="loss, average over the ranks")
    for step, ranks in restarts:
        axes.axvline(step, color="tab:red", linestyle="--", label=f"a rank was lost; {ranks} went on from here")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank")
    parser.add_argument("--commit-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="the step at which a rank kills itself")
    parser.add_argument("--die-rank", type=int, default=1, metavar="RANK")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="where to draw the losses")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
