"""DistributedDataParallel: a module whose gradients are averages over the ranks when backward() returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.allreduce import allreduce
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session.context import current
from hvlike.errors import DataParallelError, WrongTypeError
from hvlike.training.broadcast import broadcast_tensors
from hvlike.training.ddp.arguments import (
    check_bucket_cap,
    check_devices,
    check_module,
    check_ranks,
    check_torch_only,
    moved,
    parameters_of,
)
from hvlike.training.ddp.comm_hooks import Hook, allreduce_hook, compression_of, fp16_compress_hook
from hvlike.training.ddp.end_of_backward import is_inside_backward
from hvlike.training.ddp.module_gradients import ModuleGradients
from hvlike.training.ddp.module_sync import BufferSync, verify_and_broadcast
from hvlike.training.gradients.reduction import Reduction
from hvlike.training.gradients.usage_errors import warn_user
from hvlike.training.join import Join
from hvlike.training.joinable import BuiltInJoinable, JoinConfig
from hvlike.untraced import traced, untraced

OWNER = "DistributedDataParallel"


class DistributedDataParallel(nn.Module, BuiltInJoinable):
    """A module that is trained on the data of all ranks: `.grad` holds averages when backward() returns.

    A backward pass that comes through an output of a forward outside of no_sync() reduces, once, at its end; others
    only add up gradients on this rank. Reduction starts beside backward where cores are spare. At the start of a
    forward that follows a synchronised one, buffers become those of the first rank. Parameters added later are not
    reduced; changes of requires_grad take effect, alike on all ranks.

    Collective: every rank of the set makes it, and calls it as often with gradients enabled. Blocks. Without gradients
    (torch.no_grad) forward is local.

    Args:
        module: The same on every rank; kept as `.module`.
        device_ids: One GPU that inputs are moved to. Default: inputs are used where they are.
        output_device: The same GPU, as in torch.
        dim: Accepted for compatibility with torch and ignored.
        broadcast_buffers: False leaves buffers to each rank, also at the start.
        init_sync: Compare the ranks' modules and start from rank 0's.
        process_group: Torch's name for process_set. Also a group of torch.distributed with the backend "hvlike".
        bucket_cap_mb: MiB that are reduced together. Default: HVLIKE_BUCKET_BYTES, or hvlike's choice.
        find_unused_parameters: An iteration may leave out parameters. One that no rank has used keeps its `.grad`.
        check_reduction: Deprecated in torch; gives a warning.
        gradient_as_bucket_view: Without effect: gradients are reduced where they are, so there is no copy to save.
        static_graph: Every iteration uses the parameters alike, so that reentrant checkpoints may share some.
        forward_sync_buffers: False leaves buffers to each rank, but for the start.
        process_set: The ranks. Default: all.
        torch_only: Arguments of torch that hvlike does not have; they must be None or False.

    Raises:
        UsageError: An argument is wrong.
        DataParallelError: (a RuntimeError) The module cannot be trained so. From forward: the iteration before has left
            out parameters.
        MismatchError: On every rank: the modules differ.

    Example:
        model = hvlike.nn.DistributedDataParallel(model)
        loss_function(model(inputs), labels).backward()
        optimizer.step()

    Source: torch.nn.parallel.DistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessSet | dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool | None = None,
        process_set: ProcessSet | None = None,
        **torch_only: Any,
    ) -> None:
        check_torch_only(torch_only)
        context = current()
        ranks = check_ranks(process_set, process_group)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = check_module(module, ignored)
        device = check_devices(device_ids, output_device, parameters)
        reduction = Reduction(process_set=ranks, owner=OWNER, bucket_bytes=check_bucket_cap(bucket_cap_mb))
        nn.Module.__init__(self)
        BuiltInJoinable.__init__(self)
        if check_reduction:
            warn_user("The `check_reduction` argument in `DistributedDataParallel` is deprecated.", FutureWarning)
        self.module = module
        self.dim = dim
        self.device = next(iter(parameters.values())).device
        self.device_ids = None if device is None else [device.index]
        self.output_device = self.device_ids[0] if self.device_ids and output_device is None else output_device
        self.parameters_to_ignore = ignored
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.forward_sync_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self._gradients = self._new_gradients(reduction)
        self._gradients.reducers.take_name()
        self._buffer_sync = BufferSync(ranks, WeakMethod(self._named_buffers))
        self._has_buffers = bool(self._named_buffers())
        self._has_hook = False
        given = {} if broadcast_buffers is False and forward_sync_buffers is None else self._named_buffers()
        if init_sync and not reduction.is_local(context):
            verify_and_broadcast(parameters, given, (self.process_set.ranks or [0])[0], ranks)
        if not (init_sync and given) and not reduction.is_local(context):
            self._compare_start({} if init_sync else parameters)
        if self._syncs_buffers():
            self._buffer_sync.agree()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that gradients are reduced over."""
        return self._gradients.reducers.reduction.process_set or global_process_set

    @property
    def process_group(self) -> ProcessSet:
        """The ranks that gradients are reduced over, by torch's name."""
        return self.process_set

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers become those of one rank at the start of forward: `forward_sync_buffers`, by its old name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @traced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over the process set, and blocks, where gradients are enabled; else local.

        Args:
            inputs: Passed to the module.
            kwargs: Passed to the module.

        Returns:
            What the module returns.
        """
        inputs, kwargs = self._before_forward(inputs, kwargs)
        return self._after_forward(self.module(*inputs, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_join_config"], state["_join_context"] = JoinConfig.construct_disabled_join_config(), None
        hook, hook_state = self._gradients.comm_hook or (None, None)
        state["_gradients"] = self._gradients.reducers.reduction, hook, hook_state
        del state["_buffer_sync"], state["_home"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        reduction, hook, hook_state = state.pop("_gradients")
        self.__dict__.update(state)
        self._gradients = self._new_gradients(reduction)
        self._gradients.reduce_by(None, hook, hook_state)
        self._buffer_sync = BufferSync(reduction.process_set, WeakMethod(self._named_buffers))

    def _compare_start(self, parameters: Mapping[str, Tensor]) -> None:
        """Have the first rank warn where these, or buffers that nobody makes equal, are not the same on all ranks."""
        left = {} if self.forward_sync_buffers else self._named_buffers()
        buffers = {f"buffer {name}": buffer for name, buffer in left.items()}
        self._gradients.reducers.comparison.start_with({**parameters, **buffers})

    def _parameters_to_train(self) -> dict[str, Tensor]:
        return parameters_of(self.module, self.parameters_to_ignore)

    def _new_gradients(self, reduction: Reduction) -> ModuleGradients:
        parameters = self._parameters_to_train()
        unused = self.find_unused_parameters
        first, parameter = next(iter(parameters.items()))
        path, _, name = first.rpartition(".")
        self._home = self.module.get_submodule(path), name, parameter
        return ModuleGradients(parameters, reduction, find_unused=unused, static_graph=self.static_graph)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes through forwards that are made inside only add up gradients on this rank. Local.

        The next synchronised pass reduces the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let gradients be reduced in another way; once, by every rank of the set. Local.

        The hooks of hvlike.nn (allreduce_hook, fp16_compress_hook, bf16_compress_hook) become settings of the planned
        reduction and are not called.

        Args:
            state: First argument of the hook.
            hook: `hook(state, bucket)` gets a GradBucket of this rank's own gradients and returns what replaces them:
                a tensor of as many elements, or a torch Future or hvlike Handle of one. Called in backward's thread
                for every bucket at the end of a pass, before the first result is waited for; torch's own hooks for
                one bucket after the other.

        Raises:
            UsageError: The hook cannot be called.
            DataParallelError: A hook was registered before.
        """
        if not callable(hook):
            raise WrongTypeError(f"Communication hook must be callable, got {type(hook).__name__}.")
        if self._has_hook:
            raise DataParallelError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        compression = compression_of(state, hook)
        self._gradients.reduce_by(compression, hook if compression is None else None, state)
        self._has_hook = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register what dist.BuiltinCommHookType names: ALLREDUCE or FP16_COMPRESS. Local."""
        hooks: dict[str, Hook] = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
        self.register_comm_hook(None, hooks[comm_hook_type.name])

    def _set_static_graph(self) -> None:
        """Do what static_graph=True does in the constructor; every rank, before the first forward. Local."""
        if self.static_graph:
            warn_user("You've set static_graph to be True, no need to set it again.", UserWarning)
            return
        self._gradients.set_static_graph()
        self.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Name the parameters and buffers that a DistributedDataParallel of this module leaves alone. Local."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

    def reduce_through(self, output: Any) -> None:
        """Let backward passes that come through these tensors reduce, as if forward had returned them. Local.

        For losses that are computed and differentiated inside of forward; the first such pass reduces without this.
        Inside no_sync() it does nothing.

        Args:
            output: Tensors in nested lists, tuples, dicts and dataclasses.
        """
        if self.require_backward_grad_sync:
            self._gradients.after_forward(output, synchronised=True)

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs; see hvlike.join.Join.

        Args:
            divide_by_initial_world_size: Gradients of ranks without inputs count as zeros in averages, else not at all.
            enable: As for Join.
            throw_on_early_termination: As for Join.

        Returns:
            The context.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def _join_begins(self, *, divides_by_active: bool) -> None:
        self._gradients.join_begins(divides_by_active=divides_by_active)
        if self._syncs_buffers():
            self._buffer_sync.join_begins()

    def _join_fails(self) -> None:
        self._gradients.reducers.divides_by_active = False
        self._gradients.abandon()

    def _unplanned(self) -> Callable[[], object] | None:
        def main() -> None:
            if self._reduces_now(False):
                self._gradients.reduce_zeros()

        return None if self._gradients.comm_hook is None else main

    @property
    def join_device(self) -> torch.device:
        return self.device

    def _join_ends(self, context: Join) -> None:
        self._gradients.join_ends(context)
        buffers = self._named_buffers() if self.forward_sync_buffers else {}
        module, ranks = {**self._parameters_to_train(), **buffers}, self._gradients.reducers.reduction.process_set
        broadcast_tensors(OWNER, module, context.authority, ranks)
        # Ranks that have left early do not know what the last forward was.
        self.require_forward_param_sync = True

    def _reduces_now(self, wanted: bool) -> bool:
        """Return whether this iteration's backward pass reduces on any rank of a Join context. Collective; blocks."""
        flag = torch.tensor(int(wanted), device="cpu")
        name, where = f"{self._gradients.reducers.name}.reduces", self._gradients.reducers.reduction.process_set
        return bool(allreduce(flag, op=ReduceOp.MAX, name=name, process_set=where))

    @untraced
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and not is_inside_backward():
            # Inside torch.func.grad too, what is made here, and reduced, is none of the function's.
            with torch._C._DisableFuncTorch():
                self._begin_training_pass()
        if self.device_ids:
            inputs, kwargs = moved(inputs, self.device), moved(kwargs, self.device)
        return inputs, kwargs

    def _begin_training_pass(self) -> None:
        """Alone may wait for other ranks: a pass without gradients, as in an evaluation, may run on one of them."""
        holder, name, parameter = self._home
        stands_in = holder._parameters.get(name) is not parameter
        self._gradients.before_forward(synchronised=self.require_backward_grad_sync, stands_in=stands_in)
        Join.notify_join_context(self)
        if self.require_forward_param_sync and self._syncs_buffers():
            self._buffer_sync.sync(from_highest=self._join_config.enable)
        if self._join_config.enable and self._gradients.comm_hook is not None:
            self._reduces_now(self.require_backward_grad_sync and self._gradients.trains)

    @untraced
    def _after_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled():
            self.require_forward_param_sync = self.require_backward_grad_sync
            self._gradients.after_forward(output, synchronised=self.require_backward_grad_sync)
        return output

    def _syncs_buffers(self) -> bool:
        if not (self.forward_sync_buffers and self._has_buffers):
            return False
        return not self._gradients.reducers.reduction.is_local(current())

    def _named_buffers(self) -> dict[str, Tensor]:
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}
