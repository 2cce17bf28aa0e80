"""DistributedOptimizer: any torch optimizer, stepping on gradients that are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hvlike.backends.arithmetic.reduce_op import ReduceOp
from hvlike.collectives.api.objects import broadcast_object
from hvlike.collectives.compression import Compression, CompressorLike
from hvlike.collectives.requests.process_set import ProcessSet, global_process_set
from hvlike.collectives.session.context import current
from hvlike.errors import UsageError, WrongTypeError
from hvlike.training.broadcast import broadcast_optimizer_state, broadcast_tensors, named_tensors
from hvlike.training.gradients import usage_errors
from hvlike.training.gradients.adasum_deltas import AdasumDeltas
from hvlike.training.gradients.grad_state import Phase
from hvlike.training.gradients.gradients import Gradients
from hvlike.training.gradients.optimizer_wrapper import DelegatingOptimizer, reading_grad_scaler, reduce_loss
from hvlike.training.gradients.parameters import (
    check_all_named,
    check_groups,
    check_named_parameters,
    copy_options,
    options_of,
)
from hvlike.training.gradients.reduction import Reduction, registered_set
from hvlike.training.join import Join
from hvlike.training.joinable import BuiltInJoinable


class DistributedOptimizer(DelegatingOptimizer, BuiltInJoinable):
    """A torch optimizer that steps with gradients reduced over all ranks.

    It delegates. `param_groups`, `state`, `defaults`, hooks and all other attributes are those of the wrapped
    optimizer. State that exists keeps its place, and state dicts are interchangeable with the wrapped one's.
    `isinstance` holds for torch.optim.Optimizer and for the class of the wrapped one. It pickles and deep-copies.

    With a spare core, reduction starts in backward, as gradients become ready; step() finishes it. These are the
    states, and what each call does in them (= stays, > goes on to; "error" leaves the state as it is)::

                              IDLE          ACCUMULATING   REDUCING       SYNCHRONIZED
        backward, last pass   > REDUCING    > REDUCING     error if the   > REDUCING
                                                           same parameter
        backward, other pass  > ACCUM.      =              =              > ACCUM.
        step()                reduces, steps, > IDLE (in the first three)  steps, > IDLE
        synchronize()         reduces, > SYNCHRONIZED                      =
        step(), skipping      steps         error          error          steps, > IDLE
        zero_grad()           =             > IDLE         error          > IDLE
        no_sync()             allowed       allowed        error          allowed
        add_param_group()     allowed       allowed        error          allowed

    "skipping" is inside skip_synchronize(). After synchronize(), a plain step() does not reduce again; it warns once.
    A GradScaler that looks for infinities, and `hvlike.clip_grad_norm_`, synchronize by themselves, without a warning.
    step(closure) reduces after each evaluation, and returns the loss reduced in the same way.

    op=Adasum reduces what a step has changed. Each rank's optimizer steps on its own gradients, with its own state
    (momentum, say). Every parameter becomes its start plus the Adasum of the ranks' differences. Nothing is under way
    between backward and step, so the state is always IDLE: synchronize() does nothing, skip_synchronize() raises
    UsageError, and clipping and the loss of a closure stay local. A GradScaler skips the step on all ranks or on none.
    A rank whose step fails changes nothing and takes over what the others did.

    Every rank of the set makes the same calls of step() and synchronize(). A rank that has no gradient for a parameter
    contributes zeros if another rank has one; where none has, the parameter keeps `.grad` None, its state and value.
    Ranks with different numbers of batches use it in an hvlike.join.Join context.
    Making the optimizer is local and does not block.

    Args:
        optimizer: Any torch.optim.Optimizer that is not distributed already.
        named_parameters: Pairs (name, parameter), such as `model.named_parameters()`; errors show these names, and
            ranks are matched by them. They cover all parameters of the optimizer. Default: numbered names. Optimizers
            that step in several threads need names, each its own.
        compression: How gradients are sent: a member of `hvlike.Compression`.
        backward_passes_per_step: How many backward passes are summed up on this rank before gradients are reduced.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: Divides gradients by this factor before the sum and multiplies by it after. Average
            only.
        num_groups: Older name for a number as `groups`; 0 for none.
        groups: Parameters whose gradients are reduced together: a number of equal groups, or lists of parameters.
        sparse_as_dense: Send sparse gradients as dense ones. They come back sparse, but on a rank that has never had
            a sparse one for that parameter.
        process_set: The ranks to reduce over; None for all. A rank outside of it steps on its own gradients.

    Raises:
        NotInitializedError: If init() has not been called.
        UsageError: For a wrong argument.
        MismatchError: In the first step, on every rank, if ranks have different parameters or settings. If only the
            values of parameters differ, a warning is logged.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    Source: horovod.torch.DistributedOptimizer.
    """

    own_attributes = DelegatingOptimizer.own_attributes | {
        "_gradients",
        "_join_config",
        "_join_context",
        "_reduced_by_user",
        "_skipping",
        "_warned",
    }

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: CompressorLike = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet | None = None,
    ) -> None:
        current()
        if not isinstance(optimizer, Optimizer):
            raise WrongTypeError(
                f"DistributedOptimizer expects a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("DistributedOptimizer was given an optimizer that is distributed already. Wrap it once.")
        names: dict[Tensor, str] = {}
        if named_parameters is not None:
            names = check_named_parameters(named_parameters)
            check_all_named(names, (each for group in optimizer.param_groups for each in group["params"]))
        reduction = Reduction(
            op=cast(ReduceOp, op),
            compression=compression,
            predivide_factor=gradient_predivide_factor,
            groups=check_groups(groups, num_groups),
            sparse_as_dense=sparse_as_dense,
            process_set=registered_set(process_set, "DistributedOptimizer"),
        )
        self._wrap(optimizer, reduction, names, backward_passes_per_step)
        reduction.announce(current(), self._gradients.parameters, names)

    def _wrap(self, optimizer: Optimizer, reduction: Reduction, names: Mapping[Tensor, str], passes: int) -> None:
        BuiltInJoinable.__init__(self)
        self._wrapped = optimizer
        self._gradients = (AdasumDeltas if reduction.of_deltas else Gradients)(optimizer, reduction, names, passes)
        self._reduced_by_user = False
        self._skipping = False
        self._warned = False

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Finish the reduction of the gradients and let the wrapped optimizer update the parameters.

        Collective over the process set; blocks.

        Args:
            closure: Evaluates the model on this rank's data, leaves gradients, returns the loss.
            kwargs: Handed to the wrapped step().

        Returns:
            What the wrapped step() returns; with a closure, the loss reduced over the ranks.

        Raises:
            UsageError: For calls in the wrong order; see the table of the class.
            MismatchError: If ranks have different gradients.
            PeerLeftError: If a rank has left the job.
        """
        if closure is None:
            self._before_step()
        with self._gradients.stepping():
            if closure is None:
                return self._wrapped.step(**kwargs)
            return self._wrapped.step(partial(self._evaluate, closure), **kwargs)

    def synchronize(self) -> None:
        """Finish the reduction of the gradients; does nothing if that has been done since the last backward pass.

        For code that reads or changes gradients before the step: step under skip_synchronize() then.
        Collective over the process set; blocks.

        Raises:
            HorovodInternalError: As step().
        """
        self._synchronize("optimizer.synchronize()")
        self._reduced_by_user = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() use the gradients as synchronize() and the program have left them. Local.

        Raises:
            UsageError: With op=Adasum, where there is nothing to skip.
        """
        if self._reduction.of_deltas:
            raise UsageError(
                "optimizer.skip_synchronize() is not supported with op=hvd.Adasum: what the step has changed is "
                "reduced after it, so there is no earlier synchronization to skip. Call optimizer.step() outside of "
                "it; gradients may be clipped or unscaled before the step without synchronize()."
            )
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    def abandon(self) -> None:
        """Forget a step that an error has interrupted: reduction begins again with the next backward pass.

        For programs that go back to an earlier state, on every rank, after hvlike was started again. Local.
        """
        self._gradients.abandon()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes only add up gradients on this rank; the next pass outside reduces the sums. Local.

        Passes inside do not count for backward_passes_per_step. Every rank uses it for the same steps.

        Raises:
            UsageError: Between backward and step.
        """
        gradients = self._gradients
        if gradients.phase is Phase.REDUCING:
            raise UsageError(usage_errors.NO_SYNC_WHILE_REDUCING)
        before, gradients.keep_local = gradients.keep_local, True
        try:
            yield
        finally:
            gradients.keep_local = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes make a step; counting starts again. Local.

        Args:
            passes: The number of backward passes, above 0; the same on every rank.

        Raises:
            UsageError: For a number below 1, and between backward and step.
        """
        self._gradients.set_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes make a step."""
        return self._gradients.backward_passes_per_step

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that gradients are reduced over."""
        return self._reduction.process_set or global_process_set

    @property
    def gradients(self) -> Gradients | AdasumDeltas:
        """The state of the gradients: phase, parameters and reducers."""
        return self._gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and with them local sums. Local.

        Args:
            set_to_none: Set gradients to None instead of zero.

        Raises:
            UsageError: Between backward and step.
        """
        self._gradients.discard()
        self._wrapped.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their gradients are reduced like all others. Every rank adds the same. Local.

        Args:
            param_group: Parameters and options, as for the wrapped optimizer.

        Raises:
            UsageError: Between backward and step.
        """
        if self._gradients.phase is Phase.REDUCING:
            raise usage_errors.changed_while_reducing("optimizer.add_param_group()")
        self._wrapped.add_param_group(param_group)
        self._gradients.refresh()

    def before_groups_are_read(self) -> None:
        """A GradScaler that reads the groups finds reduced gradients. Collective then; local for other readers."""
        scaler = None if self._gradients.phase is Phase.SYNCHRONIZED else reading_grad_scaler()
        if scaler is not None:
            self._gradients.reducers.comparison.scaler = ref(scaler)
            self._notify_join()
            self._gradients.prepare_for_scaler()
            self._reduced_by_user = False

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        gradients = self._gradients
        names = gradients.parameters.given_names
        return _restore, (self._wrapped, self._reduction, names, gradients.backward_passes_per_step)

    def _join_begins(self, *, divides_by_active: bool) -> None:
        self._gradients.refresh()
        self._gradients.reducers.join_begins(divides_by_active=divides_by_active)

    def _join_fails(self) -> None:
        self._gradients.reducers.divides_by_active = False
        self._gradients.abandon()

    def _join_leaves(self) -> None:
        if self._gradients.phase is Phase.REDUCING:
            raise UsageError(
                "The body of the Join context ended after loss.backward() but before optimizer.step(): some gradients "
                f"are being reduced. Call optimizer.step() in the same iteration, on every rank. {usage_errors.DROP}"
            )

    def _join_ends(self, context: Join) -> None:
        self._gradients.reducers.join_ends(context)
        if not context._absent:
            return
        root, process_set, groups = context.authority, self._reduction.process_set, self._wrapped.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        initialised = [each for each in parameters if not isinstance(each, UninitializedParameter)]
        broadcast_tensors("Join", named_tensors(initialised), root, process_set)
        if not self._reduction.of_deltas:
            broadcast_optimizer_state(self, root, process_set=process_set)
            return
        # The optimizers of the ranks keep their own states.
        copy_options(broadcast_object(options_of(groups), root, process_set=process_set), groups)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    def _notify_join(self) -> None:
        try:
            Join.notify_join_context(self)
        except RuntimeError:
            # The context has ended: this step will never be completed.
            self._gradients.abandon()
            raise

    def _synchronize(self, call: str) -> None:
        gradients = self._gradients
        if gradients.phase is not Phase.SYNCHRONIZED and not self._reduction.of_deltas:
            self._notify_join()
        gradients.synchronize(call)
        self._reduced_by_user = False

    # Order of calls

    def _before_step(self) -> None:
        phase = self._gradients.phase
        if self._skipping:
            if phase not in (Phase.IDLE, Phase.SYNCHRONIZED):
                raise UsageError(
                    "optimizer.step() was called under optimizer.skip_synchronize(), but the gradients of the last "
                    "backward pass have not been reduced. Call optimizer.synchronize() before, or step without "
                    "skip_synchronize()."
                )
        elif phase is not Phase.SYNCHRONIZED:
            if self._join_context is not None:
                self._notify_join()
            self._gradients.synchronize("optimizer.step()")
        elif self._reduced_by_user and not self._warned:
            self._warned = True
            usage_errors.warn_user(usage_errors.STEP_AFTER_SYNCHRONIZE, UserWarning)
        if self._reduced_by_user:
            self._reduced_by_user = False

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss, reduction = closure(), self._reduction
        self._before_step()
        if reduction.of_deltas or reduction.is_local(current()):
            return loss
        return reduce_loss(loss, reduction.op, reduction.process_set)


def _restore(
    optimizer: Optimizer, reduction: Reduction, names: Mapping[Tensor, str], backward_passes_per_step: int
) -> DistributedOptimizer:
    """Make a copy or an unpickled DistributedOptimizer; needs no init(), so that checkpoints can be read anywhere."""
    restored = DistributedOptimizer.__new__(DistributedOptimizer)
    restored._wrap(optimizer, reduction, names, backward_passes_per_step)
    return restored


def clip_grad_norm_(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Reduce the gradients of a DistributedOptimizer and clip their total norm; a plain optimizer.step() follows.

    Also for a ZeroRedundancyOptimizer with reduce_gradients=True, where each rank holds some of the gradients. The norm
    is taken over all parameters of the optimizer. With a GradScaler call scaler.unscale_(optimizer) before.
    Collective over the optimizer's process set; blocks. Does not reduce again what is reduced already.

    Args:
        optimizer: A DistributedOptimizer, or a ZeroRedundancyOptimizer with reduce_gradients=True.
        max_norm: Gradients are scaled so that their norm is at most this.
        norm_type: Order of the norm, inf for the largest element.
        error_if_nonfinite: Raise RuntimeError where the norm is infinite or not a number.
        foreach: As in torch; a ZeroRedundancyOptimizer does not use it.

    Returns:
        The total norm before clipping, a 0-dim tensor, the same on every rank of the set. With op=Adasum the gradients
        are this rank's, and so is the norm.

    Raises:
        UsageError: The optimizer is not distributed.
        RuntimeError: On every rank: the norm is not finite, with error_if_nonfinite.

    Example:
        loss.backward()
        hvd.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    Source: `torch.nn.utils.clip_grad_norm_`.
    """
    # Loaded only here: few programs use it.
    from hvlike.training.zero.optimizer import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer._clip_grad_norm(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    if not isinstance(optimizer, DistributedOptimizer):
        raise WrongTypeError(
            "hvlike.clip_grad_norm_ expects the optimizer that hvd.DistributedOptimizer returned, got "
            f"{type(optimizer).__name__}. For one that is not distributed use torch.nn.utils.clip_grad_norm_."
        )
    optimizer._synchronize("hvlike.clip_grad_norm_")
    parameters = [parameter for group in optimizer.wrapped.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.detach()
