"""A training under hvd.elastic.run that says enough for an outside process to kill its ranks and judge the result.

    mpirun --with-ft ulfm -n 4 python program.py STEPS FOLDER

Every process writes its process id to FOLDER/process-N. The state after each commit is told as a digest, and every
attempt its rank, size and the commit it begins from. At the end the ranks that are left train again, from the commit
at which their last attempt began, and tell both results: they have to be the same.
"""

import copy
import hashlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

import hvlike as hvd

BATCH, COMMIT_EVERY, EPOCH_STEPS = 4, 3, 12
DATA = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))


def say(*words: object) -> None:
    """Print one line, whole, with the place this process had at the start."""
    sys.stdout.write(" ".join(map(str, (PLACE, *words))) + "\n")
    sys.stdout.flush()


def digest(model: nn.Module) -> str:
    """A short name for the exact values of a model's parameters; running statistics differ between ranks."""
    values = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(values).hexdigest()[:12]


def make_state() -> hvd.elastic.TorchState:
    """A model of several sizes of tensors, its optimizer, and a step number."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def train_step(state: hvd.elastic.TorchState) -> None:
    """One step; what it computes depends on the state, the rank and the size only."""
    first = (state.step * hvd.size() + hvd.rank()) * BATCH % (len(DATA) - BATCH)
    state.optimizer.zero_grad()
    state.model(DATA[first : first + BATCH]).square().mean().backward()
    state.optimizer.step()
    state.step += 1
    if state.step % EPOCH_STEPS == 0:
        # Between epochs: other operations, of other sizes and kinds.
        buffers = [each for name, each in sorted(state.model.named_buffers()) if each.is_floating_point()]
        for each in buffers:
            hvd.allreduce_(each, name="buffers")
        hvd.allgather(torch.full((hvd.rank() + 1, 5), 1.0), name="gathered")
        hvd.broadcast_object({"step": state.step}, root_rank=hvd.size() - 1)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, steps: int, begun: dict[str, object]) -> None:
    """Train up to `steps`; remembers in `begun` from what the attempt began."""
    say("BEGIN", hvd.rank(), hvd.size(), state.commits, state.step, digest(state.model))
    begun["model"] = copy.deepcopy(state.model.state_dict())
    begun["optimizer"] = copy.deepcopy(state.optimizer.state_dict())
    begun["step"] = state.step
    while state.step < steps:
        train_step(state)
        if state.step % COMMIT_EVERY == 0:
            state.commit()
            if hvd.rank() == 0:
                say("COMMIT", state.commits, hvd.size(), digest(state.model))


def main() -> None:
    """Train, then train again from where the last attempt began."""
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    (folder / f"process-{PLACE}").write_text(str(os.getpid()))
    state, begun = make_state(), {}
    train(state, steps, begun)
    result = digest(state.model)
    say("RESULT", hvd.rank(), hvd.size(), result)
    again = make_state()
    again.model.load_state_dict(begun["model"])
    again.optimizer.load_state_dict(begun["optimizer"])
    again.step = begun["step"]
    while again.step < steps:
        train_step(again)
    say("AGAIN", hvd.rank(), hvd.size(), digest(again.model))
    hvd.shutdown()
    say("END")


PLACE = os.environ["OMPI_COMM_WORLD_RANK"]

if __name__ == "__main__":
    main()
