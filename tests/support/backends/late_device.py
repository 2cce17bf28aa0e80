"""A device that is none: streams over host memory which do nothing until somebody waits for them.

What is put into a stream while it is in use is kept in a queue. A thread of the stream does it, in order, but only as
far as somebody asks: the host, who looks whether an event has passed or drains a stream, or another stream that waits
for an event. So a wait that was forgotten leaves old values where new ones are expected, every time and not now and
then.

What needs a value at once (`.item()`, `if tensor:`) is refused while a stream is in use: on a device it would make the
host wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

QUESTIONS_BEFORE_YES = 2
"""How often the host has to ask for an event until its stream sets off."""
SECONDS = 60.0


class LateEvent:
    """A point in a stream."""

    def __init__(self, stream: LateStream | None, place: int) -> None:
        self.stream = stream
        self.place = place
        self.questions = 0

    def force(self) -> None:
        """Let the stream come by."""
        if self.stream is not None:
            self.stream.release(self.place)

    def block(self) -> None:
        """Wait until it has."""
        if self.stream is not None:
            self.stream.release(self.place)
            self.stream.block(self.place)

    @property
    def passed(self) -> bool:
        """Whether it has."""
        return self.stream is None or self.stream.done >= self.place


class LateStream:
    """A queue, and a thread that works it off as far as it is asked to, and ends there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.failure: BaseException | None = None
        self.memory: list[torch.Tensor] = []
        self.waits_for: list[LateStream] = []  # By events, in their order
        self._queue: list[Callable[[], Any] | None] = []
        self._released = 0
        self._working = False
        self._changed = threading.Condition()

    def put(self, action: Callable[[], Any]) -> None:
        """Do it later."""
        with self._changed:
            self._queue.append(action)

    def record(self) -> LateEvent:
        """The point behind all of it."""
        with self._changed:
            return LateEvent(self, len(self._queue))

    def release(self, place: int) -> None:
        """Go as far as that."""
        with self._changed:
            self._released = max(self._released, place)
            if self._working or self.done >= self._released:
                return
            self._working = True
        threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def block(self, place: int) -> None:
        """Wait until the stream is as far."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.done >= place, SECONDS), f"{self.name} hangs"
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        while True:
            with self._changed:
                if self.done >= self._released:
                    self._working = False
                    return
                action = self._queue[self.done]
                self._queue[self.done] = None
            try:
                assert action is not None
                # A device knows nothing of inference mode: who may write what was looked at when it was put here.
                with torch.inference_mode():
                    action()
            except BaseException as error:
                self.failure = self.failure or error
            with self._changed:
                self.done += 1
                self._changed.notify_all()


class LateDevice:
    """See DeviceRuntime; what no stream is in use for is done at once, as on a stream that everybody waits for."""

    kind = "cpu"
    has_nccl = True

    def __init__(self) -> None:
        self.streams: list[LateStream] = []
        self.common: dict[str, LateStream] = {}
        self.kept: list[tuple[torch.Tensor, Any]] = []
        self.pinned_bytes = 0
        self.waits_of_the_host = 0
        self._mine = threading.local()

    def home(self, local_rank: int = 0) -> torch.device:
        return torch.device("cpu")

    def identity(self, device: torch.device) -> str:
        return f"late {os.getpid()}"

    def new_stream(self, device: torch.device) -> LateStream:
        self.streams.append(LateStream(f"late-{len(self.streams)}"))
        return self.streams[-1]

    def common_stream(self, device: torch.device, use: str) -> LateStream:
        return self.common.setdefault(use, self.new_stream(device))

    def is_capturing(self) -> bool:
        return False

    def beside_captures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device: torch.device) -> LateStream | None:
        return getattr(self._mine, "stream", None)

    @contextmanager
    def use(self, stream: LateStream | None) -> Iterator[None]:
        before = self.current_stream(self.home())
        self._mine.stream = stream
        mode: AbstractContextManager[Any] = nullcontext() if stream is None else _Putting(stream)
        try:
            with _disable_current_modes(), mode:
                yield
        finally:
            self._mine.stream = before

    @contextmanager
    def tell(self, stream: LateStream) -> Iterator[None]:
        """Have this stream as the current one, as far as somebody asks; what torch computes is done at once."""
        self._mine.stream = stream
        try:
            yield
        finally:
            self._mine.stream = None

    def aside(self) -> AbstractContextManager[None]:
        return self.use(None)

    def address(self, stream: LateStream) -> int:
        return 1 + self.streams.index(stream)

    def record(self, stream: LateStream | None) -> LateEvent:
        return LateEvent(None, 0) if stream is None else stream.record()

    def wait(self, stream: LateStream | None, event: LateEvent) -> None:
        if stream is None:
            self.waits_of_the_host += 1
            event.block()
        elif event.stream is not None:
            stream.waits_for.append(event.stream)
            stream.put(event.block)

    def has_passed(self, event: LateEvent) -> bool:
        event.questions += 1
        if event.questions >= QUESTIONS_BEFORE_YES:
            event.force()
        return event.passed

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        # What is read before it was written shall look like nothing.
        with _disable_current_modes(), torch.inference_mode(False):
            return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.current_stream(self.home()) is not None, "a copy without a stream would make the host wait"
        target.copy_(source)

    def keep(self, tensor: torch.Tensor, stream: LateStream | None) -> None:
        self.kept.append((tensor, stream))

    def finish(self) -> None:
        """Wait for all that was put into any stream; ranks whose streams wait for each other all do so."""
        ends = [stream.record() for stream in self.streams]
        for end in ends:
            end.force()
        for end in ends:
            end.block()

    def drain(self, stream: LateStream) -> None:
        """Wait, as the host, for all that was put into one stream; the others go only as far as it needs them."""
        stream.record().block()


class _Putting(TorchDispatchMode):
    """Puts what torch computes into a stream; shapes and views are known at once."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler otherwise, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise AssertionError(f"{func} asks the device for a value, which makes the host wait")
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if schema.is_mutable and not schema.name.startswith("aten::set_"):
            self._stream.put(lambda: func(*args, **kwargs))
            return args[0] if schema.returns else None
        outputs = func(*args, **kwargs)
        if any(each.alias_info is not None for each in schema.returns):
            # A view: it is about where values are, not which.
            return outputs
        listed = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        # Memory of a stream is given to others when the stream is done with it, not when Python is.
        self._stream.memory += listed
        if not tensors:
            return outputs
        # The result has its shape now and its values later.
        for each in listed:
            _spoil(each)

        def compute() -> None:
            found = func(*args, **kwargs)
            for target, value in zip(listed, found if isinstance(found, (list, tuple)) else [found], strict=True):
                target.copy_(value)

        self._stream.put(compute)
        return outputs


def _spoil(tensor: torch.Tensor) -> None:
    """What is read too early shall look like nothing."""
    if tensor.numel():
        tensor.fill_(True if tensor.dtype is torch.bool else 99)
