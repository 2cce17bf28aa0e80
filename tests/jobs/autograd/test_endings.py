"""Workers that are silent or gone in a backward: the others hear of it by name in time, and can go on."""

from support.job import run_job

PREAMBLE = """
import os, signal, sys, threading, time
from functools import partial
import torch
import hvlike as hvd
from hvlike import autograd, rpc
from hvlike.rpc.agent.agent import current_agent

hvd.init()
rank = hvd.rank()

def begin():
    rpc.init_rpc(f"worker{rank}", rpc_timeout=5)

def square(value):
    return value * value

going_on = threading.Event()

class Signalling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, pid, number):
        ctx.signal = pid, number
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        pid, number = ctx.signal
        os.kill(pid, number)
        # A signal takes its time: nothing must be answered before it has arrived.
        wait = going_on.wait if number == signal.SIGSTOP else partial(wait_until_gone, pid)
        wait()
        return gradient, None, None

def wait_until_gone(pid):
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)

def go_on():
    going_on.set()

def signalling(value, pid, number):
    return Signalling.apply(value, pid, number)

def call_on(ranks, value):
    return rpc.rpc_sync(ranks[0], call_on, (ranks[1:], value)) if ranks else square(value)

def error_of(context, root, mode):
    start = time.monotonic()
    try:
        autograd.backward(context, [root], retain_graph=True, mode=mode)
    except RuntimeError as error:
        assert time.monotonic() - start < 30, error
        return str(error)
    raise AssertionError("no error")

def check_that_the_rest_goes_on(other):
    leaf = torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(other, square, (leaf,)).sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [6, 6]

def say(text):
    # One write: the lines of several ranks must not be mixed.
    sys.stdout.write(f"rank {rank}: {text}\\n")
    sys.stdout.flush()

leaf = torch.ones(2, requires_grad=True)
begin()
"""

LEAVES = """
if rank == 0:
    with autograd.context() as context:
        direct = rpc.rpc_sync(2, square, (leaf,)).sum()
        behind = call_on([1, 2], leaf).sum()
        hvd.barrier()
        while 2 not in current_agent().lost:
            time.sleep(0.01)
        for mode in ("fast", "safe", "smart"):
            text = error_of(context, direct, mode)
            assert text.startswith("Error on Node 0: ") and "worker2 (rank 2)" in text, text
        text = error_of(context, behind, "smart")
        assert "worker2 (rank 2)" in text, text
    check_that_the_rest_goes_on(1)
    hvd.barrier()
    rpc.shutdown()
else:
    hvd.barrier()
    if rank == 2:
        rpc.shutdown(graceful=False)
    hvd.barrier()
    if rank == 1:
        rpc.shutdown()
begin()
"""

SILENT = """
awake = threading.Event()

def wake(pid):
    while not awake.wait(0.05):
        os.kill(pid, signal.SIGCONT)

if rank == 0:
    pid = rpc.rpc_sync(2, os.getpid)
    with autograd.context() as context:
        direct = rpc.rpc_sync(2, square, (leaf,)).sum()
        falls_silent = rpc.rpc_sync(2, signalling, (leaf, pid, signal.SIGSTOP)).sum()
        rpc._set_rpc_timeout(0.5)
        # It falls silent in the middle of the first backward; the others find it so.
        for root, mode in ((falls_silent, "safe"), (direct, "safe"), (direct, "smart")):
            text = error_of(context, root, mode)
            assert "RPC ran for more than" in text and "worker2 (rank 2)" in text, text
    rpc._set_rpc_timeout(60)
    check_that_the_rest_goes_on(1)
    # Again and again: on a busy machine it may begin that backward, and fall silent, only now.
    threading.Thread(target=wake, args=(pid,), daemon=True).start()
    rpc.rpc_sync(2, go_on)
    check_that_the_rest_goes_on(2)
rpc.shutdown()
awake.set()
say("silent")
"""

LEAVES_MEANWHILE = """
class Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        # Of this backward nothing comes any more.
        rpc.shutdown(graceful=False)
        return gradient

def leaving(value):
    return Leaving.apply(value)

if rank == 0:
    with autograd.context() as context:
        root = call_on([1], rpc.rpc_sync(2, leaving, (leaf,))).sum()
        text = error_of(context, root, "safe")
        assert "worker2 (rank 2)" in text, text
    check_that_the_rest_goes_on(1)
hvd.barrier()
if rank != 2:
    rpc.shutdown()
say("left")
begin()
"""


def test_a_worker_that_is_not_there_is_named_and_the_rest_goes_on() -> None:
    job = run_job(PREAMBLE + LEAVES + LEAVES_MEANWHILE + SILENT, 3).check()
    expected = [f"rank {rank}: {what}" for rank in range(3) for what in ("left", "silent")]
    assert sorted(job.stdout.split("\n")[:-1]) == expected, job.describe()
