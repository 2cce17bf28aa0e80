"""A program for Horovod, run by `python -m hvlike horovod`: what programs touch, and what a spawned worker needs."""

import sys

import horovod
import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import nccl_built, split_list
from horovod.torch.mpi_ops import Average, allreduce_async_, synchronize
from horovod.torch.optimizer import DistributedOptimizer


class Numbers(torch.utils.data.Dataset):
    """Of this file: a worker that is spawned unpickles it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def main() -> None:
    hvd.init()
    assert sys.argv[1:] == ["--epochs", "2"], sys.argv
    assert horovod.torch is hvd
    assert horovod.common.exceptions.HorovodInternalError is hvd.HorovodInternalError is HorovodInternalError
    assert hvd.mpi_ops.allreduce is hvd.allreduce
    assert hvd.compression.FP16Compressor
    assert hvd.elastic.state.TorchState is hvd.elastic.TorchState
    assert horovod.__version__
    assert not nccl_built()
    assert split_list([1, 2, 3], 2) == [[1, 2], [3]]
    assert ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, epoch=3).epoch == 3

    tensor = torch.full((3,), float(hvd.rank()))
    handle = allreduce_async_(tensor, name="mean", op=Average)
    assert int(handle) >= 0
    mean = (hvd.size() - 1) / 2
    assert synchronize(handle).tolist() == [mean] * 3

    # Horovod's gradient: the mean over the ranks, not the sum.
    leaf = torch.ones(2, requires_grad=True)
    hvd.broadcast(leaf, 0).sum().backward()
    assert leaf.grad.tolist() == [1.0 if hvd.rank() == 0 else 0.0] * 2

    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert isinstance(optimizer, DistributedOptimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    assert "horovod" in str(type(optimizer))
    assert "horovod" in str(optimizer.__class__)
    assert optimizer.__class__.__name__ == "SGD"
    assert set(optimizer._parameter_names.values()) == {"weight", "bias"}
    assert optimizer._requires_update == set(model.parameters())

    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.synchronize()
        assert not optimizer._handles
        optimizer._should_synchronize = False
        optimizer.step()
        optimizer._should_synchronize = True
    model(torch.ones(1, 2)).sum().backward()
    assert set(optimizer._handles) == set(model.parameters())
    optimizer.step()
    print(f"rank {hvd.rank()} of {hvd.size()}: well")


if __name__ == "__main__":
    main()
