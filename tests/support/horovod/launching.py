"""A program that starts its ranks with horovod.run, and asks for the alias itself."""

import hvlike.horovod

hvlike.horovod.install()
hvlike.horovod.install()

import horovod  # noqa: E402
import horovod.torch as hvd  # noqa: E402


def train(rate: float) -> tuple[int, int, float]:
    hvd.init()
    leaf = torch_leaf()
    hvd.broadcast(leaf, 0).sum().backward()
    return hvd.rank(), hvd.size(), float(leaf.grad) * rate


def torch_leaf() -> "hvd.torch.Tensor":
    import torch

    return torch.ones((), requires_grad=True)


if __name__ == "__main__":
    print(horovod.run(train, args=(0.5,), num_proc=2, use_mpi=True, verbose=1))
