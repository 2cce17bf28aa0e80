"""`Work`: what a call of torch.distributed returns; it ends in the loop, or in the thread that drives the call."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvlike.backends.operation import Operation
from hvlike.system.system import system
from hvlike.torch_distributed.recording import recorded
from hvlike.untraced import untraced

if TYPE_CHECKING:
    from hvlike.torch_distributed.calls import CallQueue
    from hvlike.torch_distributed.transfers import Transfers

# Bound from C++, with overloads that no class written in Python can repeat.
_WorkBase: Any = dist.Work

_NOTHING = timedelta()


@untraced
class Work(_WorkBase):
    """One call of a group. Its methods are those of torch.distributed.Work, which torch also calls from C++."""

    def __init__(self, calls: CallQueue | Transfers, number: int, what: str, outputs: Any, limit: float) -> None:
        """number: of the call in its group. outputs: what `result` returns. limit: how many seconds it may take."""
        super().__init__()
        self.number = number
        self.what = what
        self.limit = limit
        self.began = system.monotonic()
        self.deadline = self.began + limit
        self.operation = Operation()
        self.source = -1
        self.devices: list[int | str | torch.device] = []  # The GPU of its tensors
        self.outputs = outputs
        self._calls = calls
        self._error: BaseException | None = None  # That of the operation, explained
        self._untold: list[torch.futures.Future[None]] = []  # Who takes the future from here completes it
        self._future: Any = None

    # -- how it ends ----------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.operation.done()

    @property
    def error(self) -> BaseException | None:
        return self._error or self.operation.error

    def tell(self) -> None:
        """It has ended: complete the future, if there is one."""
        if self._untold:
            loop = self._calls.loop
            if loop.drives_here:
                # What is chained to the future may wait for other calls, which the loop could not.
                loop.thread_pool.submit(self._tell)
            else:
                self._tell()

    # -- torch.distributed.Work -----------------------------------------------------------------

    def wait(self, timeout: timedelta = _NOTHING) -> bool:
        """Wait until the call has ended. Blocks.

        Args:
            timeout: How long at most, beside the timeout of the group; 0: as long as that.

        Returns:
            True.

        Raises:
            StalledError: After the timeout; it names the ranks that are missing. The call goes on; it is the timeout of
                the group that ends it, and the group with it.
            HorovodInternalError: Where a rank is lost, or the ranks have called different things.
        """
        if not self.ended:
            seconds = timeout.total_seconds()
            with recorded("wait"):
                self._calls.wait_for(self, seconds if seconds > 0 else None)
        if self.operation.error is not None:
            self._error = self._error or self._calls.explained(self.operation.error, self)
            raise self._error
        return self.operation.wait()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self.ended:
            self._calls.flush()
            self._calls.loop.turn()
        return self.ended

    def is_success(self) -> bool:
        return self.ended and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the outputs; it fails with the error of the call, also for those that wait in C++."""
        if self._future is None:
            # With devices who waits for the future waits on its own stream, in which thread ever it is completed.
            trigger: torch.futures.Future[None] = torch.futures.Future(devices=self.devices)
            # Only an exception in a callback is an error for C++, too.
            self._future = trigger.then(lambda _: self._value())
            self._calls.promises.add(self)
            self._untold.append(trigger)
            if self.ended:
                self._tell()
        return self._future

    get_future_result = get_future

    def _tell(self) -> None:
        try:
            trigger = self._untold.pop()
        except IndexError:
            return
        trigger.set_result(None)
        self._calls.promises.discard(self)

    def _value(self) -> Any:
        if self.error is not None:
            raise self.error
        self.operation.wait()
        return self.outputs


@untraced
class Works(_WorkBase):
    """Several works as one: those that were begun while torch.distributed coalesced."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _NOTHING) -> bool:
        return all(each.wait(timeout) for each in self._works)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)

    def is_success(self) -> bool:
        return all(each.is_success() for each in self._works)

    def exception(self) -> BaseException | None:
        return next((each.error for each in self._works if each.error is not None), None)

    def result(self) -> Any:
        return [each.result() for each in self._works]

    def get_future(self) -> Any:
        return torch.futures.collect_all([each.get_future() for each in self._works])
