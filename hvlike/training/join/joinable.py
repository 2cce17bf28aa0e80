"""Joinable, JoinHook and JoinConfig: the contract between a Join context and what takes part in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hvlike.collectives.requests.process_set import ProcessSet

if TYPE_CHECKING:
    from hvlike.training.join.join import JoinContext


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


def _nothing(*_: object) -> None: ...


@dataclass(eq=False)
class BuiltInHook(JoinHook):
    """The hook of hvlike's own joinables. Their reductions are planned, so proxies take part without a message."""

    begin: Callable[[], object] = _nothing
    """The body begins. Local."""
    leave: Callable[[], object] = _nothing
    """The body has ended well. Local. Raises UsageError where a step is half done."""
    abandon: Callable[[], object] = _nothing
    """The context was left in the middle of a step, here or elsewhere: forget that step. Local."""
    take_over: Callable[[JoinContext], object] = _nothing
    """All ranks take over one rank's state. Collective; blocks."""
    main: Callable[[], object] | None = None
    """What is not planned of an iteration, so that the context needs a heartbeat."""
    context: JoinContext = field(init=False)

    def main_hook(self) -> None:
        if self.main is not None:
            self.main()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.take_over(self.context)


class Joinable(ABC):
    """Base class of what can take part in a Join context.

    A subclass calls the constructor of this class, and `Join.notify_join_context(self)` once in each iteration before
    its own collective operations.

    Source: torch.distributed.algorithms.join.Joinable.
    """

    _join_config: JoinConfig
    _join_context: JoinContext | None

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
    def join_process_group(self) -> ProcessSet:
        """The ranks that take part; the same for all joinables of a context."""
