"""After the loss of a rank whatever was in use ends with an error on all survivors, and is used again as it is.

Every part of a program is trained twice: a rank kills itself in the first attempt, and elastic.run calls the function
again on the others, with the same objects.
"""

from pathlib import Path

import pytest
from support.job import IS_OPEN_MPI, start_job

PREAMBLE = """
import os, signal, sys, time
import torch
import hvlike as hvd
from hvlike.join import Join

hvd.init()
me = hvd.rank()  # Its number for ever; hvd.rank() changes.
torch.manual_seed(1)

def say(text):
    os.write(1, f"{text}\\n".encode())

class Fatal(torch.autograd.Function):
    '''Its backward kills the process, in the step that was chosen.'''
    @staticmethod
    def forward(ctx, value, fatal):
        ctx.fatal = fatal
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None

def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 40), hvd.SyncBatchNorm(40), torch.nn.Tanh(), torch.nn.Linear(40, 2))

def loss_of(model, dies):
    return Fatal.apply(model(torch.randn(5, 6)), dies).square().mean()

def check_same(models):
    sums = [sum(p.detach().double().sum().item() for p in model.parameters()) for model in models]
    everybody = hvd.allgather_object(sums)
    assert all(each == everybody[0] for each in everybody), everybody

def train_all(state, parts, victims):
    '''Each part with the loss of a rank; returns how many errors this rank has met.'''
    @hvd.elastic.run
    def train(state):
        while state.part < len(parts):
            dies = me == victims[state.part]
            try:
                parts[state.part](dies)
            except hvd.HorovodInternalError as error:
                met.append((state.part, type(error).__name__, str(error)))
                raise
            assert hvd.size() == ranks - 1 - state.part, hvd.size()
            state.part += 1
            state.commit()

    met, ranks = [], hvd.size()
    train(state)
    say(f"rank {me}: went through {len(parts)} parts, met {sorted({part for part, *_ in met})}")
    for part, kind, text in met:
        say(f"rank {me}: part {part}: {kind}: {text}")
"""

JOIN = """
compressions = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
}
models = {name: net() for name in compressions}
optimizers = {
    name: hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=compressions[name]
    )
    for name, model in models.items()
}
hvd.broadcast_parameters(torch.nn.ModuleList(models.values()).state_dict(), root_rank=0)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

def optimizers_in_join(dies):
    with Join(list(optimizers.values())):
        for step in range(4 + hvd.rank() % 2):
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                # All ranks reach the statistics of the batch norm in as many steps.
                models[name].train(step < 4)
                loss_of(models[name], dies and step == 2 and name == "bf16").backward()
                optimizer.step()
    check_same(models.values())

def scaled(dies):
    for step in range(4):
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            models[name].train()
            scaler.scale(loss_of(models[name], dies and step == 2 and name == "fp16")).backward()
            scaler.step(optimizer)
            scaler.update()
    check_same(models.values())

ddp = hvd.nn.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Linear(20, 2)))
ddp_optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

def ddp_in_join(dies):
    with ddp.join():
        for step in range(4 + hvd.rank() % 2):
            ddp_optimizer.zero_grad()
            loss_of(ddp, dies and step == 2).backward()
            ddp_optimizer.step()
    check_same([ddp])

state = hvd.elastic.TorchState(
    **{f"model {name}".replace(" ", "_"): model for name, model in models.items()},
    **{f"optimizer {name}".replace(" ", "_"): optimizer for name, optimizer in optimizers.items()},
    ddp=ddp, part=0,
)
train_all(state, [optimizers_in_join, ddp_in_join, scaled], [3, 0, 2])
"""

SESSIONS = """
from datetime import timedelta
import torch.distributed as dist
from hvlike import rpc

def square(value):
    return value * value

def slow():
    time.sleep(0.2)
    return 1

def calls(dies):
    rpc.init_rpc(f"worker{hvd.rank()}")
    others = [each for each in range(hvd.size()) if each != hvd.rank()]
    for step in range(4):
        if dies and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        # Waits in C++, for survivors too, which may have begun to start again.
        torch.futures.wait_all([rpc.rpc_async(each, slow) for each in others])
    rpc.shutdown()

def collectives(dies):
    dist.init_process_group("hvlike", timeout=timedelta(seconds=60))
    half = dist.new_group(sorted({0, hvd.size() - 1}))
    try:
        for step in range(4):
            if dies and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (3, 1_000_000)]
            if half is not dist.GroupMember.NON_GROUP_MEMBER:
                works.append(dist.barrier(half, async_op=True))
            for work in works:
                work.wait()
    finally:
        dist.destroy_process_group()

train_all(hvd.elastic.ObjectState(part=0), [calls, collectives], [2, 0])
"""

FILES = "OMPI_MCA_btl_sm_backing_directory"
"""Where Open MPI keeps files that a killed rank leaves behind: not in /dev/shm here."""

needs_fault_tolerance = pytest.mark.skipif(not IS_OPEN_MPI, reason="a flag of Open MPI's mpirun")


def survivor_says(program: str, ranks: int, said: str, folder: Path) -> None:
    """Run it until rank 1, the last one, has said this; how the launcher ends then is the business of other tests."""
    with start_job(program, ranks, env={FILES: str(folder)}, flags=["--with-ft", "ulfm"]) as job:
        job.wait_for_output(said, 100)


@needs_fault_tolerance
@pytest.mark.timeout(120)
def test_joins_optimizers_and_modules_are_used_again_after_a_loss(tmp_path: Path) -> None:
    survivor_says(PREAMBLE + JOIN, 4, "rank 1: went through 3 parts, met [0, 1, 2]", tmp_path)


@needs_fault_tolerance
@pytest.mark.timeout(120)
def test_sessions_of_rpc_and_groups_of_torch_begin_anew_after_a_loss(tmp_path: Path) -> None:
    survivor_says(PREAMBLE + SESSIONS, 3, "rank 1: went through 2 parts, met [0, 1]", tmp_path)
