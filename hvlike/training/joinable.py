"""Joinable, JoinHook and JoinConfig: the contract between a Join context and what takes part in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from hvlike.collectives.requests.process_set import ProcessSet, global_process_set

if TYPE_CHECKING:
    from hvlike.training.join import Join


class JoinConfig(NamedTuple):
    """What a Joinable knows of the context it is in."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool

    @staticmethod
    def construct_disabled_join_config() -> JoinConfig:
        """Return the configuration outside of a context."""
        return JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class JoinHook:
    """What a Joinable does in a context after this rank has run out of inputs. Override what you need.

    Source: torch.distributed.algorithms.join.JoinHook.
    """

    def main_hook(self) -> None:
        """Do the collective operations of one training iteration; called again while any rank has inputs left."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once, when no rank has inputs left.

        Args:
            is_last_joiner: This rank never had to run its main hooks. True on several ranks where they have the same
                number of inputs; on none where each has missed an iteration.
        """


class Joinable(ABC):
    """Base class of what can take part in a Join context.

    A subclass calls the constructor of this class, and `Join.notify_join_context(self)` once in each iteration before
    its own collective operations.

    Source: torch.distributed.algorithms.join.Joinable.
    """

    _join_config: JoinConfig
    _join_context: Join | None

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig.construct_disabled_join_config()
        self._join_context = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook for one context.

        Args:
            kwargs: The keywords of the Join, the same for all its joinables.

        Returns:
            The hook.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the tensors that the context itself communicates."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessSet | dist.ProcessGroup:
        """The ranks that take part; the same for all joinables of a context."""


class BuiltInJoinable(Joinable):
    """One of hvlike's own. Its reductions are planned, so proxies take part without a message."""

    process_set: Any

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> BuiltInHook:
        """Return the hook for one Join context. Local.

        Args:
            divide_by_initial_world_size: Average over all ranks, where those without inputs contribute zeros. False:
                average over the ranks that have inputs. Only where averages are taken.
            kwargs: What other joinables of the context are told; ignored.

        Returns:
            A new hook.
        """
        return BuiltInHook(self, not divide_by_initial_world_size, self._unplanned())

    @property
    def join_process_group(self) -> ProcessSet:
        return self.process_set or global_process_set

    def _join_begins(self, *, divides_by_active: bool) -> None:
        """The body begins. Local."""

    def _join_leaves(self) -> None:
        """The body has ended well. Local. Raises UsageError where a step is half done."""

    def _join_fails(self) -> None:
        """The context was left in the middle of a step, here or elsewhere: forget that step. Local."""

    def _join_ends(self, context: Join) -> None:
        """All ranks take over one rank's state. Collective; blocks."""

    def _unplanned(self) -> Callable[[], object] | None:
        """What is not planned of an iteration, so that the context needs a heartbeat."""
        return None


@dataclass(eq=False)
class BuiltInHook(JoinHook):
    """That of a BuiltInJoinable, whose methods the context calls."""

    joinable: BuiltInJoinable
    divides_by_active: bool
    main: Callable[[], object] | None

    def main_hook(self) -> None:
        if self.main is not None:
            self.main()
