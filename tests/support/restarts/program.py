"""A training of elastic.run for tests of restarts: writes what it ends with, and may do strange things on its way.

    program.py STEPS RESULT [--pause S] [--commit-every N] [--kill RANK@STEP]

The result is the digest of parameters, momentum, what each step has seen and the running statistics of every rank: the
same bits whatever has happened, as long as there are as many ranks each time.
"""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvlike as hvd

ROWS, BATCH = 192, 4


def main() -> None:
    """Train, and write the digest on rank 0."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(ROWS, 6), torch.randn(ROWS, 1))
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, epoch=0, step=0, seen=[]
    )
    train(state, data, options)
    buffers = hvd.allgather_object(digest_of(list(model.buffers())))
    if hvd.rank() == 0:
        values = [*model.parameters(), *(optimizer.state[each]["momentum_buffer"] for each in model.parameters())]
        text = repr((digest_of(values), state.step, state.epoch, state.seen, buffers))
        Path(options.result).write_text(hashlib.sha256(text.encode()).hexdigest())
        print("trained", flush=True)
    hvd.shutdown()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, data: TensorDataset, options: argparse.Namespace) -> None:
    """Train from where the state says; a commit after every so many steps and at the end of an epoch."""
    if hvd.rank() == 0:
        print(f"from step {state.step}", flush=True)
    while state.step < options.steps:
        loader = DataLoader(data, batch_size=BATCH, sampler=state.sampler)
        for batch, (inputs, targets) in enumerate(loader):
            torch.manual_seed(state.step * hvd.size() + hvd.rank())
            state.optimizer.zero_grad()
            noise = 0.1 * torch.randn_like(inputs)
            loss = (state.model(inputs + noise) - targets).square().mean()
            loss.backward()
            if (hvd.rank(), state.step) == options.kill and not os.path.exists(f"{options.result}.killed"):
                Path(f"{options.result}.killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.step()
            state.schedule.step()
            state.seen.append(hvd.allreduce(loss.detach(), name="loss").item())
            state.sampler.record_batch(batch, BATCH)
            state.step += 1
            time.sleep(options.pause)
            if state.step % options.commit_every == 0 and state.step < options.steps:
                state.commit()
            if state.step == options.steps:
                break
        else:
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
    state.commit()


def digest_of(values: list[torch.Tensor]) -> str:
    """A name for the exact values."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values)).hexdigest()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("result")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
    parser.add_argument("--commit-every", type=int, default=3)
    parser.add_argument("--kill", type=lambda text: tuple(map(int, text.split("@"))), metavar="RANK@STEP", help="once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
