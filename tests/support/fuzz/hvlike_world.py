"""A rank of hvlike: how a program is wrapped there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from support.fuzz.models import SyncNorm
from support.fuzz.training import LR, OPTIMIZERS, Training, make_optimizer, start_differently
from torch import Tensor

import hvlike as hvd
from hvlike.join import Join, Joinable
from hvlike.nn import DistributedDataParallel, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from hvlike.optim import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16}
# Read by the program's wrapper, not by hvlike's.
OF_PROGRAM = ("named", "start", "hook", "in_backward", "process_set")


def own_hook(state: object, bucket: Any) -> Any:
    """Average a bucket, as a user's hook does."""
    return hvd.allreduce_async(bucket.buffer(), name=f"bucket {bucket.index()}")


IN_BACKWARD = {"at the end": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
HOOKS = {"allreduce": allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook, "own": own_hook}


class HvlikeWorld:
    """This process, after hvd.init()."""

    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self._sets: dict[tuple[int, ...], Any] = {}
        self._averages = 0

    def process_set(self, ranks: Sequence[int]) -> Any:
        """Return a process set of these ranks, registered at its first use."""
        key = tuple(ranks)
        if key == tuple(range(self.size)):
            return hvd.global_process_set
        if key not in self._sets:
            self._sets[key] = hvd.add_process_set(list(key))
        return self._sets[key]

    def options(self, training: Training) -> dict[str, Any]:
        """Return the options of the wrapper as hvlike takes them."""
        options = {name: value for name, value in training.program.options if name not in OF_PROGRAM}
        if "op" in options:
            options["op"] = OPS[options["op"]]
        if "compression" in options:
            options["compression"] = COMPRESSIONS[options["compression"]]
        if len(training.ranks) < self.size:
            options["process_set"] = self.process_set(training.ranks)
        if options.get("groups") == "lists":
            parameters = [each for each in training.network.parameters() if each.requires_grad]
            options["groups"] = [parameters[::2], parameters[1::2]]
        return options

    def wrap(self, training: Training) -> None:
        """By the classes of the program's kind."""
        program, network = training.program, training.network
        for part in network.parts:
            if isinstance(part, SyncNorm):
                part.layer = hvd.convert_sync_batchnorm(part.layer)
        start = program.given.get("start")
        if start:
            start_differently(network, self.rank)
        if start == "broadcast":
            hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        self._make_wrappers(training)

    def _make_wrappers(self, training: Training) -> None:
        program, network = training.program, training.network
        options = self.options(training)
        parameters = list(network.parameters())
        kind, settings = OPTIMIZERS[program.optimizer]
        if program.kind == "optimizer":
            names = [(training.label + name, each) for name, each in network.named_parameters()]
            named = names if program.given.get("named") else None
            training.optimizer = hvd.DistributedOptimizer(
                make_optimizer(program.optimizer, parameters), named, **options
            )
        elif self.rank not in training.ranks:
            training.optimizer = make_optimizer(program.optimizer, parameters)
        elif program.kind == "zero alone":
            training.optimizer = ZeroRedundancyOptimizer(
                parameters, kind, reduce_gradients=True, process_set=options.get("process_set"), lr=LR, **settings
            )
        else:
            model = training.model = DistributedDataParallel(network, **options)
            hook = HOOKS[program.given.get("hook", "allreduce")]
            if program.kind != "zero":
                training.optimizer = make_optimizer(program.optimizer, parameters)
            else:
                way = program.given.get("in_backward")
                zero = training.optimizer = ZeroRedundancyOptimizer(
                    parameters,
                    kind,
                    process_set=options.get("process_set"),
                    overlap_with_ddp=way is not None,
                    lr=LR,
                    **settings,
                )
                if way is not None:
                    model.register_comm_hook(None, IN_BACKWARD[way](hook, model, zero, warm_up=0))
                    return
            if "hook" in program.given:
                model.register_comm_hook(None, hook)

    def backward(self, training: Training, loss: Tensor, *, reduces: bool, **options: bool) -> None:
        """Run a backward pass; hvlike sees for itself what follows."""
        loss.backward(**options)

    def no_sync(self, training: Training) -> AbstractContextManager[None]:
        """Return the context of local passes."""
        wrapper = training.optimizer if training.model is training.network else training.model
        return wrapper.no_sync() if hasattr(wrapper, "no_sync") else nullcontext()

    def uneven(
        self, training: Training, counts: Sequence[int], step: Callable[[int], None], *, by_active: bool
    ) -> None:
        """Join what the program trains with."""
        wrappers = [training.model, training.optimizer]
        with Join(
            [each for each in wrappers if isinstance(each, Joinable)], divide_by_initial_world_size=not by_active
        ):
            for number in range(counts[self.rank]):
                step(number)

    def average(self, tensors: list[Tensor]) -> None:
        """Average by hand."""
        for place, tensor in enumerate(tensors):
            tensor.copy_(hvd.allreduce(tensor, name=f"by hand {place}"))

    def clip(self, training: Training, norm: float) -> None:
        """Clip by hvlike's function where gradients are not reduced yet."""
        if training.program.kind in ("optimizer", "zero alone") and isinstance(training.optimizer, Joinable):
            hvd.clip_grad_norm_(training.optimizer, norm)
        else:
            torch.nn.utils.clip_grad_norm_(training.network.parameters(), norm)

    def rewrap(self, training: Training) -> None:
        """Wrap the model anew while the earlier wrapper is there."""
        self._make_wrappers(training)

    def resume(self, training: Training, ranks: Sequence[int]) -> None:
        """Send the state of the first rank, wrap anew, load."""
        root = training.ranks[0]
        state = training.optimizer.state_dict() if self.rank == root else None
        state = hvd.broadcast_object(state, root_rank=root)
        hvd.broadcast_parameters(training.network.state_dict(), root_rank=root)
        training.ranks, training.model = ranks, training.network
        self._make_wrappers(training)
        training.optimizer.load_state_dict(state)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of the program, by the backend that changes nothing of what it computes."""
        torch._dynamo.reset()
        return torch.compile(function, backend="eager")

    def about_to_step(self, training: Training) -> None:
        """Only the oracle looks."""

    def for_scaler(self, training: Training) -> Any:
        """Return what a GradScaler is given."""
        return training.optimizer

    def for_scheduler(self, training: Training) -> Any:
        """Return what a schedule is given."""
        return training.optimizer

    def state(self, training: Training) -> dict[int, dict[str, Any]]:
        """Return the whole state; that of ZeRO comes from all ranks."""
        found: dict[int, dict[str, Any]] = training.optimizer.state_dict()["state"]
        if isinstance(training.optimizer, ZeroRedundancyOptimizer):
            # They answer only as long as they make no other step.
            hvd.barrier(process_set=self.process_set(training.ranks))
        return found
