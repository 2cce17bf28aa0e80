"""Failures around a rank: workers of a DataLoader, full and read-only file systems, checkpoints."""

from dataclasses import replace

from support.failures.case import Case
from support.failures.endings import failing_rank

LOADER = """
import os, signal, sys, time
import torch
import hvlike as hvd

FAILING = {failing}

def end():
    sys.stdout.write(f"END {{time.time()}}\\n")
    sys.stdout.flush()

class Data(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.rank == FAILING and index == 20:
            {in_worker}
        return torch.ones(3)

def batches(rank):
    return torch.utils.data.DataLoader(
        Data(rank), batch_size=4, num_workers=2, multiprocessing_context={method!r}, persistent_workers=True
    )

if __name__ == "__main__":
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    if {before}:
        source = iter(batches(rank))
        next(source)
    hvd.init()
    if not {before}:
        source = iter(batches(rank))
    for number, batch in enumerate(source):
        if rank == FAILING and number == 3:
            {in_rank}
        hvd.allreduce(batch, name="batch")
    hvd.barrier()
"""

WORKERS = {
    "no failure": ("pass", "pass", ("",)),
    "worker raises": ("end(); raise ValueError('boom')", "pass", ("ValueError: boom",)),
    "worker killed": ("end(); os.kill(os.getpid(), signal.SIGKILL)", "pass", ("DataLoader worker",)),
    "worker calls hvlike": ("end(); hvd.init(); hvd.barrier()", "pass", ("ForkedProcessError", "LaunchError")),
    "rank raises": ("pass", "end(); raise ValueError('boom')", ("ValueError: boom",)),
    "rank killed": ("pass", "end(); os.kill(os.getpid(), signal.SIGKILL)", ("signal 9", "vanished")),
}
"""What a worker of the failing rank does, what the rank does, and words of the cause."""


def loader_case(what: str, method: str, moment: str, ranks: int) -> Case:
    """moment: whether workers are started before or after init()."""
    in_worker, in_rank, words = WORKERS[what]
    text = LOADER.format(
        failing=failing_rank(ranks), in_worker=in_worker, in_rank=in_rank, method=method, before=moment == "before init"
    )
    phase = f"DataLoader, {method}, {moment}"
    return Case(what, phase, ranks, text, words, ends_well=what == "no failure")


WORK = """
import sys, time
import torch
import hvlike as hvd

sys.stdout.write(f"END {time.time()}\\n")
sys.stdout.flush()
hvd.init()
assert hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum, name="work")[0] == hvd.size()
"""

FULL_SHARED_MEMORY = "mount -t tmpfs -o size=64k tmpfs /dev/shm; head -c 64k /dev/zero >/dev/shm/full"
READ_ONLY_TMP = "mount --rbind /tmp /tmp; mount -o remount,ro,bind /tmp"
OWN_TMPDIR = "export TMPDIR=$TMPDIR/own; mkdir $TMPDIR; mount -t tmpfs tmpfs $TMPDIR"

CHECKPOINT = """
import os, signal, sys, time
import torch
import hvlike as hvd
from hvlike import checkpoint

folder = os.environ["FOLDER"]

def end(*_):
    sys.stdout.write(f"END {time.time()}\\n")
    sys.stdout.flush()

hvd.init()
model = torch.nn.Linear(3, 1)
first = {step: checkpoint.save(folder, step, model=model, number=step) for step in (1, 2)}
"""

INTERRUPTED = """
def die(handle):
    end()
    os.kill(os.getpid(), signal.SIGKILL)

os.fsync = die
checkpoint.save(folder, 3, model=model, number=3)
"""

DISK_FULL = """
end()
checkpoint.save(folder, 3, model=model, big=torch.ones(1 << 20))
"""

CUT_OFF = """
if hvd.rank() == 0:
    os.truncate(first[2], 100)
hvd.barrier()
end()
loaded = checkpoint.load(folder, model=model)
assert (loaded.step, loaded.values) == (1, {"number": 1})
"""

ALL_DAMAGED = """
if hvd.rank() == 0:
    for path in first.values():
        os.truncate(path, 100)
hvd.barrier()
end()
checkpoint.load(folder, model=model)
"""

RESUME = """
import os
import torch
import hvlike as hvd
from hvlike import checkpoint

hvd.init()
model = torch.nn.Linear(3, 1)
loaded = checkpoint.load(os.environ["FOLDER"], model=model)
assert (loaded.step, loaded.values) == (2, {"number": 2}), loaded
"""

PLACES = {
    ("full /dev/shm", "init"): Case("", "", 0, WORK, ("/dev/shm has 0 KiB free",), setup=FULL_SHARED_MEMORY),
    ("read-only /tmp", "start of mpirun"): Case("", "", 0, WORK, ("Read-only file system",), setup=READ_ONLY_TMP),
    ("read-only /tmp, TMPDIR elsewhere", "init"): Case(
        "", "", 0, WORK, ("",), setup=f"{OWN_TMPDIR}; {READ_ONLY_TMP}", ends_well=True
    ),
    ("killed while it writes", "checkpoint"): Case(
        "", "", 0, CHECKPOINT + INTERRUPTED, ("signal 9", "vanished"), afterwards=RESUME
    ),
    ("disk full", "checkpoint"): Case(
        "", "", 0, CHECKPOINT + DISK_FULL, ("No space left",), setup="mount -t tmpfs -o size=1m tmpfs $FOLDER"
    ),
    ("newest damaged", "checkpoint"): Case("", "", 0, CHECKPOINT + CUT_OFF, ("is passed over",), ends_well=True),
    ("all damaged", "checkpoint"): Case("", "", 0, CHECKPOINT + ALL_DAMAGED, ("can be read",)),
}


def surroundings() -> list[Case]:
    """All of them at 2 to 4 ranks."""
    loaders = [
        loader_case(what, method, moment, ranks)
        for what in WORKERS
        for method in ("fork", "spawn")
        for moment in ("before init", "after init")
        for ranks in (2, 3, 4)
    ]
    places = [
        replace(case, failure=failure, phase=phase, ranks=ranks)
        for (failure, phase), case in PLACES.items()
        for ranks in (2, 3, 4)
    ]
    return loaders + places
