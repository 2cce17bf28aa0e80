"""ZeroRedundancyOptimizer: any torch optimizer, its state and its work shared among the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.requests.plan import Options
from hvlike.collectives.requests.process_set import ProcessSet
from hvlike.collectives.session.context import current
from hvlike.errors import HorovodInternalError, StateError, UsageError
from hvlike.training.gradients.grad_state import gradient_dtype
from hvlike.training.gradients.optimizer_wrapper import ScalerLook, reading_grad_scaler
from hvlike.training.gradients.ownership import Claim
from hvlike.training.gradients.parameters import (
    GroupOptions,
    copy_options,
    describe_options,
    describe_scale,
    gpu_of,
    options_of,
    temporary_gradients,
)
from hvlike.training.gradients.planned_queue import PlannedQueue
from hvlike.training.gradients.reduction import ranks_of_group
from hvlike.training.join import Join
from hvlike.training.joinable import BuiltInJoinable
from hvlike.training.zero.exchange import (
    GradientReduction,
    ParameterExchange,
    Partition,
    check_parameters,
    check_type,
    warn_if_gradients_differ,
)
from hvlike.training.zero.sharded_state import ShardedState, StateLock, state_service
from hvlike.training.zero.steps import ShardedSteps, StepShare

_log = logging.getLogger("hvlike")


class ZeroRedundancyOptimizer(ShardedState, BuiltInJoinable):
    """A torch optimizer that spreads its state over the ranks: each keeps and updates about 1/N of the parameters.

    Whole tensors are assigned to ranks by size, the same on every rank. In step() each rank updates those it owns, in a
    plain optimizer of its own (`optim`), and all ranks get the updated parameters. `param_groups` has the groups of all
    parameters; options that are changed there (by a learning rate scheduler, say) reach `optim` with the next step, and
    what `optim` changes reaches `param_groups`. `state` holds this rank's share.

    Collective over the set, also for a rank without data; blocks.

    Args:
        params: An iterable of tensors, all dense, of one dtype, or of dicts, which become parameter groups.
        optimizer_class: Class of the plain optimizer.
        process_set: The ranks to share among. Default: all.
        parameters_as_bucket_view: Make the parameters of each owner views of one flat tensor, which travels as it is.
        overlap_with_ddp: A communication hook of DistributedDataParallel makes the update
            (hvlike.optim.hook_with_zero_step), and step() does nothing.
        reduce_gradients: False: gradients are the same on all ranks when step() is called, as DistributedDataParallel
            leaves them; where they are not, the first step logs a warning. True: they are this rank's own, and step()
            averages each over the ranks, on the rank that owns its parameter. Missing ones count as zeros where any
            rank has one, and p.grad is None afterwards on other ranks.
        process_group: Torch's name for process_set. Also a group of torch.distributed with the backend "hvlike".
        defaults: Keywords of optimizer_class.

    Raises:
        TypeError: params has no parameters.
        UsageError: (a ValueError) An argument is wrong.
        MismatchError: On every rank: ranks have different parameters or settings.
        NotInitializedError: init() has not been called.

    Example:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3, reduce_gradients=True)

    Source: torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et al. 2020, ZeRO (stages 1 and 2).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        process_set: ProcessSet | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        reduce_gradients: bool = False,
        process_group: ProcessSet | dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        accepted = check_parameters(params)
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise UsageError(
                "ZeroRedundancyOptimizer: optimizer_class must be a subclass of torch.optim.Optimizer, got "
                f"{optimizer_class!r}. Pass the class, and its arguments as keywords."
            )
        if overlap_with_ddp and reduce_gradients:
            raise UsageError(
                "ZeroRedundancyOptimizer: overlap_with_ddp=True leaves the reduction to DistributedDataParallel, "
                "reduce_gradients=True claims it. Choose one."
            )
        self.initialized = False
        self._groups: list[dict[str, Any]] = []
        Optimizer.__init__(self, accepted, defaults)
        BuiltInJoinable.__init__(self)
        self.process_set = ranks_of_group(process_set or process_group)
        self._group = current().find_set(self.process_set, "ZeroRedundancyOptimizer").group
        self.rank, self.world_size = self._group.rank, self._group.size
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.reduces_gradients, self.overlaps_with_ddp = reduce_gradients, overlap_with_ddp
        self._partition = Partition(self._groups, self.world_size)
        self._claim = Claim("ZeroRedundancyOptimizer with reduce_gradients=True")
        if reduce_gradients:
            self._claim.take_over(self._partition.parameters)
        self.optim: Optimizer = optimizer_class(self._partition.groups_of(self.rank), **defaults)
        self.state = self.optim.state
        copy_options(self.optim.param_groups, self._groups)
        self._step = self._version = 0
        self.is_absent = False  # This rank has left the body of a Join context
        self._consolidated = None
        self._changes = StateLock()
        self._scaler: ref[Any] | None = None  # The GradScaler that reads the gradients, if any
        self._look: ScalerLook | None = None  # Of a GradScaler, at the reduced gradients of this step
        self._compared = self.reduces_gradients or self.world_size == 1  # Gradients were, or need not be
        self._prepare()
        self.initialized = True

    # The step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's share of the parameters and get the others'. Collective over the process set; blocks.

        Args:
            closure: Evaluates the model and leaves gradients; passed on to the plain optimizer.
            kwargs: Passed on to the plain optimizer.

        Returns:
            What the plain optimizer returns.

        Raises:
            UsageError: Gradients have arrived after they were reduced.
            PeerLeftError: Another rank has ended.
        """
        if self.overlaps_with_ddp:
            _log.warning("`step()` should not be included in the training loop when `overlap_with_ddp=True`")
            return None
        Join.notify_join_context(self)
        if closure is None:
            # In a Join context a rank may be absent and could not compare.
            if not self._compared and not self._join_config.enable:
                self._compared = True
                gradients = [each.grad for each in self._partition.parameters]
                warn_if_gradients_differ(self._queue.name, gradients, self.process_set, warns=self.rank == 0)
            self._reduce()
        elif self.reduces_gradients:
            closure = partial(self._evaluate, closure)
        result, failures = None, []
        try:
            result = self.step_share(closure, kwargs)
        except Exception as error:
            if closure is not None:
                # Others may wait in the reduction after their closures.
                raise
            failures.append(error)
        self.share(kwargs, failures)
        return result

    def step_share(self, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        """Update this rank's share alone. Local.

        Args:
            closure: As of step().
            arguments: Keywords of the plain optimizer's step().

        Returns:
            What the plain optimizer returns.
        """
        copy_options(self._groups, self.optim.param_groups)
        with self._changes.change():
            self._version += 1
            try:
                if closure is None:
                    return self.optim.step(**arguments)
                return self.optim.step(closure=closure, **arguments)
            finally:
                copy_options(self.optim.param_groups, self._groups)

    def share(self, arguments: dict[str, Any], failures: list[Exception]) -> None:
        """Give all ranks the updated parameters. Collective; blocks.

        Args:
            arguments: The keywords of the step, for ranks that are out of data and update their share now.
            failures: What step_share has raised on this rank, if it has. Raised again once the other ranks know, and
                taken out: a frame that names its own error keeps the optimizer until the garbage collector runs.

        Raises:
            HorovodInternalError: Another rank could not update its share.
        """
        self._step += 1
        active = self.world_size
        if self.world_size > 1:
            active = self._steps.update(options_of(self._groups), arguments, *failures[:1])
        if failures:
            raise failures.pop(0)
        if self._steps.failure is not None:
            raise HorovodInternalError(self._steps.failure)
        if self._end_look() and active < self.world_size:
            raise UsageError(
                "ZeroRedundancyOptimizer with reduce_gradients=True cannot use a GradScaler while some ranks are out "
                "of data: their share of the gradients is not unscaled. Reduce with hvlike.nn.DistributedDataParallel "
                "instead."
            )

    def _reduce(self) -> None:
        if not self.reduces_gradients or self.world_size == 1:
            return
        self._claim.use(self._partition.parameters)
        if not self._steps.is_reduced:
            self._steps.reduce()
            return
        if self._look is not None:
            self._look.end()
        own = set(self._partition.owned(self.rank))
        foreign = [each.grad for place, each in enumerate(self._partition.parameters) if place not in own]
        if any(gradient is not None for gradient in foreign):
            raise UsageError(
                "ZeroRedundancyOptimizer: a backward pass ran after the gradients were reduced (by "
                "hvlike.clip_grad_norm_ or a GradScaler) and before step(). Run all backward passes of a step first, "
                "then clip, then step; to start anew call optimizer.zero_grad()."
            )

    def _end_look(self) -> bool:
        """Return whether a GradScaler has looked at the gradients of this step, which is over."""
        look, self._look = self._look, None
        if look is not None:
            look.end()
        return look is not None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._steps.is_reduced = False
        self._reduce()
        return loss

    def _step_absent(
        self, options: GroupOptions, arguments: dict[str, Any], gradients: Mapping[Tensor, Tensor | None]
    ) -> None:
        """Update this rank's share while it is out of data; in the loop."""
        copy_options(options, self._groups)
        with temporary_gradients(gradients):
            self.step_share(None, arguments)
        self._step += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters. Local.

        Args:
            set_to_none: Set gradients to None; else to zeros.
        """
        self._steps.is_reduced = False
        self._end_look()
        super().zero_grad(set_to_none=set_to_none)

    def _clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        if not self.reduces_gradients:
            raise UsageError(
                "hvlike.clip_grad_norm_ expects a ZeroRedundancyOptimizer with reduce_gradients=True. Where "
                "DistributedDataParallel reduces, gradients are complete after backward(): use "
                "torch.nn.utils.clip_grad_norm_."
            )
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise UsageError(f"hvlike.clip_grad_norm_: norm_type must be > 0 for shared gradients, got {norm_type}.")
        parameters = self._partition.parameters
        if self.world_size == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite).detach()
        self._reduce()
        norm = self._steps.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if error_if_nonfinite and not norm.isfinite():
            raise StateError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return norm.to(gradient_dtype(parameters[0]))

    # Groups

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in the order of a state dict."""
        return self._partition.parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parameters, on every rank."""
        self.before_groups_are_read()
        return self._groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._groups = value

    def before_groups_are_read(self) -> None:
        """Reduce gradients for a GradScaler that reads the groups: it finds infinities on all ranks or on none.

        Collective then; local for other readers.
        """
        scaler = reading_grad_scaler() if self.__dict__.get("initialized") and self.reduces_gradients else None
        if scaler is None:
            return
        self._scaler = ref(scaler)
        if self.world_size == 1 or self._look is not None:
            return
        self._reduce()
        norm = self._steps.clip(torch.inf, torch.inf, error_if_nonfinite=True)
        # The scaler needs a gradient also on a rank that owns no parameter.
        parameter = self._partition.parameters[next(iter(self._partition.owned(self.rank)), 0)]
        self._look = ScalerLook(parameter, is_infinite=not norm.isfinite())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; ranks that hold least so far get them, and the others stay where they are.

        Collective over the process set; blocks. Every rank adds the same.

        Args:
            param_group: The parameters under "params", and options.

        Raises:
            UsageError: Wrong parameters, or the call is inside a Join context.
            RuntimeError: With overlap_with_ddp.
        """
        if self.initialized and self.overlaps_with_ddp:
            raise StateError(
                "ZeroRedundancyOptimizer with `overlap_with_ddp=True` only supports a single parameter group"
            )
        if self.initialized and self._join_config.enable:
            raise UsageError(
                "ZeroRedundancyOptimizer.add_param_group() was called inside a Join context, where ranks may be "
                "absent. Add the group on every rank before or after it."
            )
        super().add_param_group(param_group)
        if not self.initialized:
            return
        try:
            check_type([parameter for group in self._groups for parameter in group["params"]])
        except UsageError:
            self._groups.pop()
            raise
        self._queue.close()
        self._partition = Partition(self._groups, self.world_size)
        self.optim.add_param_group(self._partition.groups_of(self.rank)[-1])
        copy_options(self.optim.param_groups, self._groups)
        self._version += 1
        self._prepare()

    def _attach(self) -> None:
        self._group = current().find_set(self.process_set, "ZeroRedundancyOptimizer").group
        if (self.rank, self.world_size) != (self._group.rank, self._group.size):
            self.rank, self.world_size = self._group.rank, self._group.size
            self._partition = Partition(self._groups, self.world_size)
            self.optim = type(self.optim)(self._partition.groups_of(self.rank), **self.defaults)
            self.state = self.optim.state
        self._consolidated = None
        self.is_absent = False
        self._end_look()
        # All ranks compare again, as those that have come anew do.
        self._compared = self.reduces_gradients or self.world_size == 1
        self._queue.forget()
        self._prepare()

    def _prepare(self) -> None:
        self._claim.take(self._partition.parameters if self.reduces_gradients else [])
        if self.parameters_as_bucket_view:
            self._partition.check_views()
        described = self._partition.describe()
        described["optimizer_class"] = type(self.optim).__qualname__
        described["reduce_gradients"] = self.reduces_gradients
        described["parameters_as_bucket_view"] = self.parameters_as_bucket_view
        self._queue = PlannedQueue(
            "ZeroRedundancyOptimizer",
            self.process_set,
            described,
            advice="Build the same model and the same optimizer on every rank.",
            device=gpu_of(self._partition.parameters),
        )
        exchange = ParameterExchange(self._partition, self.rank, as_buckets=self.parameters_as_bucket_view)
        reduction = GradientReduction(self._partition, self.rank) if self.reduces_gradients else None
        # No reference cycle: an optimizer that is dropped is freed at once, on every rank.
        step_absent: WeakMethod[StepShare] = WeakMethod(self._step_absent)
        self._steps = ShardedSteps(self._queue, self._partition, self.rank, exchange, reduction, step_absent)
        self._queue.stand_in = self._steps.stand_in
        self._queue.options = WeakMethod(self._options)
        if self.world_size > 1:
            # Answers must be possible before another rank knows that this one has agreed.
            state_service(current())
            self._queue.agree()
            state_service(current()).register((self._group.number, self._queue.name), self)

    def _options(self, at_end: bool) -> Options:
        return (*describe_options(self._groups), *describe_scale(self._scaler))

    # Join

    def _join_begins(self, *, divides_by_active: bool) -> None:
        self._steps.divides_by_active = divides_by_active

    def _join_leaves(self) -> None:
        if self._steps.is_reduced:
            raise UsageError(
                "ZeroRedundancyOptimizer: the body of the Join context has ended after gradients were reduced (by "
                "hvlike.clip_grad_norm_ or a GradScaler) and before step(). Call step() or zero_grad() first."
            )
        self.is_absent = True

    def _join_fails(self) -> None:
        self._steps.divides_by_active = self._steps.is_reduced = self.is_absent = False

    def _join_ends(self, context: Join) -> None:
        self._join_fails()
        if context._absent:
            told = broadcast_object(options_of(self._groups), context.authority, process_set=self.process_set)
            copy_options(told, self._groups)
            copy_options(told, self.optim.param_groups)

    @property
    def join_device(self) -> torch.device:
        return self._partition.parameters[0].device
