"""A training under hvd.elastic.run that says enough for an outside process to kill its ranks and judge the result.

    mpirun --with-ft ulfm -n 4 python program.py STEPS FOLDER [plain|zero]

Every process writes its process id to FOLDER/process-N. The state after each commit is told as a digest, and every
attempt its rank, size and the commit it begins from. At the end the ranks that are left train again, from the commit
at which their last attempt began, and tell both results: they have to be the same.

Each training has what only one rank has. `plain`: running statistics, of which fewer ranks get those of rank 0.
`zero`: the shards of a ZeroRedundancyOptimizer, whose states the digest holds by parameter, whoever owns it. After the
digest come the digests of the statistics by rank, and what stays where ranks are fewer: those of rank 0.
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
    """A short name for the exact values of a model's parameters."""
    values = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(values).hexdigest()[:12]


def describe(state: hvd.elastic.TorchState) -> list[object]:
    """A digest of what all ranks share, and what each has of its own. Collective."""
    if TRAINING == "plain":
        statistics = hvd.allgather_object(short(dict(state.model.named_buffers())))
        return [digest(state.model), ",".join(statistics), statistics[0]]
    own = state.optimizer.local_state_dict()
    shards = hvd.allgather_object({place: short(each) for place, each in own["state"].items()})
    return [short([digest(state.model), sorted(each for shard in shards for each in shard.items())]), "-", "-"]


def short(values: object) -> str:
    """A short name for the exact values of tensors, numbers and text in lists and dicts."""
    if isinstance(values, torch.Tensor):
        text = values.detach().numpy().tobytes()
    elif isinstance(values, dict):
        text = "".join(f"{key!r}: {short(each)}, " for key, each in values.items()).encode()
    elif isinstance(values, (list, tuple)):
        text = "".join(map(short, values)).encode()
    else:
        text = repr(values).encode()
    return hashlib.sha256(text).hexdigest()[:12]


def make_state() -> hvd.elastic.TorchState:
    """A model of several sizes of tensors, its optimizer, and a step number."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    if TRAINING == "zero":
        adam = torch.optim.Adam
        optimizer = hvd.optim.ZeroRedundancyOptimizer(model.parameters(), adam, reduce_gradients=True, lr=1e-3)
    else:
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
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
    say("BEGIN", hvd.rank(), hvd.size(), state.commits, state.step, *describe(state))
    own = state.optimizer.sharded_state_dict if TRAINING == "zero" else state.optimizer.state_dict
    begun["model"] = copy.deepcopy(state.model.state_dict())
    begun["optimizer"] = copy.deepcopy(own())
    begun["step"] = state.step
    while state.step < steps:
        train_step(state)
        if state.step % COMMIT_EVERY == 0:
            state.commit()
            told = describe(state)
            if hvd.rank() == 0:
                say("COMMIT", state.commits, hvd.size(), *told)
    begun["result"] = describe(state)


def main() -> None:
    """Train, then train again from where the last attempt began."""
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    (folder / f"process-{PLACE}").write_text(str(os.getpid()))
    state, begun = make_state(), {}
    train(state, steps, begun)
    say("RESULT", hvd.rank(), hvd.size(), *begun["result"])
    again = make_state()
    again.model.load_state_dict(begun["model"])
    if TRAINING == "zero":
        again.optimizer.load_sharded_state_dict(hvd.allgather_object(begun["optimizer"]))
    else:
        again.optimizer.load_state_dict(begun["optimizer"])
    again.step = begun["step"]
    while again.step < steps:
        train_step(again)
    say("AGAIN", hvd.rank(), hvd.size(), *describe(again))
    hvd.shutdown()
    say("END")


PLACE = os.environ["OMPI_COMM_WORLD_RANK"]
TRAINING = sys.argv[3] if len(sys.argv) > 3 else "plain"

if __name__ == "__main__":
    main()
