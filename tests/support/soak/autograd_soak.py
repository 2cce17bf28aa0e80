"""Many training steps over RPC on every rank: python tests/support/soak/autograd_soak.py STEPS, under mpirun -n 3.

Each step has a context of its own: nested calls, RRefs, a backward in one of the modes, an optimizer over RRefs now and
then, and now and then an error in the middle of a backward. STEPS counts those of all ranks. Ends with no context and
no live RRef anywhere, and with memory that has stopped growing. Rank 0 prints what came out.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soaking import GROWTH_BYTES, Driver, Watch, resident_bytes, settle
from torch import Tensor

import hvlike as hvd
from hvlike import autograd, rpc
from hvlike.autograd.contexts import contexts

WARM_UP = 0.4
"""The part of the steps after which memory is watched."""
LOOKS = 60
SIDE = 8
WEIGHT = torch.full((SIDE, SIDE), 0.1, requires_grad=True)
"""Of this rank; only gradients of it are looked at, so that all steps are alike."""
PARAMETERS = [torch.nn.Parameter(torch.zeros(SIDE)) for _ in range(2)]
"""Of this rank; optimizers of other ranks change them."""


class Fails(torch.autograd.Function):
    """Goes wrong in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("asked for")


def layer(path: list[int], value: Tensor) -> Tensor:
    """One layer on each rank of the path, this one first."""
    here = value @ WEIGHT
    if not path:
        return here
    further: Tensor = rpc.rpc_sync(path[0], layer, (path[1:], here))
    return further


def failing(value: Tensor) -> Tensor:
    result: Tensor = Fails.apply(value)  # type: ignore[no-untyped-call]
    return result


def scaled(value: Tensor) -> Tensor:
    return value * PARAMETERS[0] + PARAMETERS[1]


def parameters() -> list[Any]:
    """References to the parameters of this rank."""
    return [rpc.RRef(each) for each in PARAMETERS]


class Steps(Driver):
    """Draws a step, takes it, and checks what it has left."""

    def kinds(self) -> dict[Callable[[], None], int]:
        """As Driver."""
        return {
            self.nested: 8,
            self.wasteful: 4,
            self.references: 4,
            self.error: 2,
            self.repeated: 3,
            self.train: 3,
        }

    def nested(self) -> None:
        with autograd.context() as context:
            path = self._path()
            value = rpc.rpc_sync(path[0], layer, (path[1:], WEIGHT))
            autograd.backward(context, [value.sum()], mode=self._draw.choice(["safe", "smart", "fast"]))
            assert torch.allclose(self._check(context), self._right(path))

    def wasteful(self) -> None:
        with autograd.context() as context:
            for _ in range(self._draw.randint(1, 4)):
                rpc.rpc_sync(self._somebody(), layer, ([self._somebody()], WEIGHT))
            futures = [rpc.rpc_async(self._somebody(), layer, ([], WEIGHT)) for _ in range(3)]
            roots = [future.wait().sum() for future in futures[:2]]
            autograd.backward(context, roots, mode=self._draw.choice(["safe", "smart"]))
            self._check(context)
            futures[2].wait()

    def references(self) -> None:
        with autograd.context() as context:
            reference = rpc.remote(self._somebody(), layer, ([], WEIGHT))
            total = rpc.remote(self._somebody(), torch.sum, (reference.to_here(),))
            total.backward(context)
            self._check(context)

    def error(self) -> None:
        with autograd.context() as context:
            value = rpc.rpc_sync(self._somebody(), failing, (rpc.rpc_sync(self._somebody(), layer, ([], WEIGHT)),))
            with pytest.raises(RuntimeError, match=r"Error on Node .*asked for"):
                autograd.backward(context, [value.sum()], mode=self._draw.choice(["safe", "smart", "fast"]))
            if self._draw.random() < 0.5:
                # The context is as good as before.
                again = rpc.rpc_sync(self._somebody(), layer, ([], WEIGHT))
                autograd.backward(context, [again.sum()])
                self._check(context)

    def repeated(self) -> None:
        with autograd.context() as context:
            path = self._path()
            root = rpc.rpc_sync(path[0], layer, (path[1:], WEIGHT)).sum()
            for _ in range(3):
                autograd.backward(context, [root], retain_graph=True)
            assert torch.allclose(self._check(context), 3 * self._right(path))

    def train(self) -> None:
        owner = self._somebody()
        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, rpc.rpc_sync(owner, parameters), lr=1e-3)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync(owner, scaled, (torch.ones(SIDE),)).sum()])
            optimizer.step(context)

    def _right(self, path: list[int]) -> Tensor:
        """The gradient of this rank's weight for the layers of a path, by ordinary autograd."""
        mine = WEIGHT.detach().clone().requires_grad_()
        value = mine
        for rank in path:
            value = value @ (mine if rank == self._rank else WEIGHT.detach())
        return torch.autograd.grad(value.sum(), mine)[0]

    def _check(self, context: int) -> Tensor:
        found = autograd.get_gradients(context)[WEIGHT]
        assert torch.isfinite(found).all()
        assert found.shape == WEIGHT.shape
        assert float(found.abs().sum()) > 0
        return found


def drive(steps: int) -> Watch:
    """Take so many steps; returns what the memory was meanwhile."""
    # The first optimizer of a process imports torch's compiler, which takes 70 MiB.
    torch.optim.SGD(PARAMETERS, lr=1e-3).step()
    watch = Watch(steps, warm_up=WARM_UP, looks=LOOKS)
    driver = Steps(hvd.rank())
    for step in range(steps):
        driver.step()
        watch.look(step)
    return watch


def left() -> tuple[int, int]:
    """Contexts and values for RRefs that are still on this rank."""
    return len(contexts.live()), len(rpc.statistics().live_rrefs)


def main() -> None:
    """Drive this rank, and look at what is left on all."""
    hvd.init()
    steps = int(sys.argv[1]) // hvd.size()
    rpc.api._set_leak_checking(True)
    rpc.init_rpc(f"worker{hvd.rank()}")
    begun = time.monotonic()
    with open("/dev/null", "w") as nowhere, contextlib.redirect_stderr(nowhere):
        watch = drive(steps)
        taken = time.monotonic() - begun
        # Others still call this rank.
        rpc.api._all_gather(None)
    settle(lambda: left() == (0, 0))
    everything = rpc.api._all_gather((watch.growth, resident_bytes(), *left()))
    rpc.shutdown()
    if hvd.rank() == 0:
        print(f"{steps * hvd.size()} steps in {taken:.1f} s")
    for worker, (grown, resident, live_contexts, live_rrefs) in sorted(everything.items()):
        if hvd.rank() == 0:
            print(
                f"{worker}: {grown / 2**20:+.2f} MiB of {resident / 2**20:.0f}, {live_contexts} contexts, "
                f"{live_rrefs} live RRefs"
            )
        assert (live_contexts, live_rrefs) == (0, 0), f"{worker} is not empty: {live_contexts}, {live_rrefs}"
        assert grown < GROWTH_BYTES, f"{worker} has grown by {grown:.0f} bytes"
    if hvd.rank() == 0:
        print("all well", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
