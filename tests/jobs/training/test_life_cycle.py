"""Optimizers in whole jobs: process sets, copies of them, shutdown and init again, and before init."""

from support.job import run_job

PROCESS_SETS = """
import copy
import torch
import hvlike as hvd
from hvlike.collectives.api.objects import allgather_object

sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])]
hvd.init(process_sets=sets)
rank = hvd.rank()
assert hvd.size() == 3


def train(optimizer, parameter):
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * (rank + 1.0)).sum().backward()
        hvd.clip_grad_norm_(optimizer, 1e9)
        optimizer.step()
    return allgather_object(parameter.detach().tolist())


def make(process_set):
    parameter = torch.nn.Parameter(torch.zeros(2))
    return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), process_set=process_set), parameter


# Ranks 0 and 2 share gradients 1 and 3, rank 1 is on its own: two steps of 0.5.
optimizer, parameter = make(sets[0])
expected = [[-2.0, -2.0], [-2.0, -2.0], [-2.0, -2.0]]
assert train(optimizer, parameter) == expected
copied = copy.deepcopy((optimizer, parameter))
assert train(*copied) == [[-4.0, -4.0]] * 3

# A set of one, and its complement: nobody but its members takes part.
optimizer, parameter = make(sets[1])
assert train(optimizer, parameter) == [[-1.0, -1.0], [-2.0, -2.0], [-3.0, -3.0]]
optimizer, parameter = make(None)
assert train(optimizer, parameter) == [[-2.0, -2.0]] * 3

# Broadcasts inside a set: the root is a rank of the world.
tensor = torch.full((2,), float(rank))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=float(rank + 1))
if rank != 1:
    hvd.broadcast_parameters([tensor], 2, process_set=sets[0])
    hvd.broadcast_optimizer_state(optimizer, 2, process_set=sets[0])
assert tensor.tolist() == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]][rank]
assert optimizer.param_groups[0]["lr"] == [3.0, 2.0, 3.0][rank]

# L-BFGS in a set: the loss is that of the set.
parameter = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([parameter]), process_set=sets[0])


def closure():
    optimizer.zero_grad()
    loss = (parameter - rank).square().sum()
    loss.backward()
    return loss


optimizer.step(closure)
values = allgather_object(parameter.detach().tolist())
assert values[0] == values[2]
assert all(abs(value - 1.0) < 1e-4 for value in values[0] + values[1])
try:
    hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), process_set=hvd.ProcessSet([0, 1]))
except ValueError as error:
    assert "was passed to init(process_sets=[...])" in str(error)
else:
    raise SystemExit("an unregistered set was accepted")
hvd.shutdown()
print("done", rank)
"""

AGAIN = """
import os
import pickle
import sys
import torch
import hvlike as hvd

os.environ["HVLIKE_OVERLAP"] = sys.argv[1]
parameter = torch.nn.Parameter(torch.zeros(2))
plain = torch.optim.SGD([parameter], lr=1.0)
try:
    hvd.DistributedOptimizer(plain)
except ValueError as error:
    assert str(error) == "hvlike: Horovod has not been initialized; use hvd.init()."
hvd.init()
optimizer = hvd.DistributedOptimizer(plain)


def step():
    optimizer.zero_grad()
    (parameter * hvd.rank()).sum().backward()
    optimizer.step()


step()
data = pickle.dumps(optimizer)
hvd.shutdown()
# A checkpoint can be read by a program that does not train.
restored = pickle.loads(data)
assert restored.param_groups[0]["params"][0].tolist() == parameter.tolist()
try:
    optimizer.step()
except ValueError as error:
    assert "hvd.init()" in str(error)
else:
    raise SystemExit("a step without init was accepted")
hvd.init()
step()
step()
hvd.shutdown()
hvd.init()
step()
mean = sum(range(hvd.size())) / hvd.size()
assert parameter.tolist() == [-4 * mean] * 2, parameter
hvd.shutdown()
print("done", mean)
"""


def test_process_sets_and_shutdown_and_init_again() -> None:
    assert run_job(PROCESS_SETS + AGAIN, 3, args=["1"]).check().stdout.count("done") == 6


def test_shutdown_and_init_again_alone() -> None:
    assert run_job(AGAIN, 1, args=["0"]).check().stdout.count("done") == 1
