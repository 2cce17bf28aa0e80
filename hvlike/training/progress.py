"""hvd.progress: a progress bar for a loop that all ranks run, shown once, with figures averaged over the ranks.

A bar only shows: where the program's stderr does not take it, it is gone, and the loop goes on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from hvlike.collectives.api.statistics import metrics_of
from hvlike.collectives.session.context import current, is_running
from hvlike.errors import UsageError, WrongTypeError
from hvlike.observe import printing
from hvlike.observe.looking import only_looks
from hvlike.transport.host.parents import columns_of_terminal
from hvlike.untraced import untraced

T = TypeVar("T")

logger = logging.getLogger("hvlike")


@untraced
class Progress(Generic[T]):
    """A bar, made by hvd.progress. Iterate over it, or call update() yourself and close it (or use `with`)."""

    def __init__(self, iterable: Iterable[T], desc: str, bar: Any) -> None:
        """`bar` is the tqdm object that shows it here; None: nothing is shown."""
        self._iterable = iterable
        self._bar = bar
        self._context = current()
        self._gazette = metrics_of(self._context)
        self._column = self._gazette.open(desc)
        self._sums: dict[str, tuple[Any, int]] = {}
        self._due = 0.0

    @property
    def shown(self) -> bool:
        """Whether this rank shows the bar."""
        return self._bar is not None

    @property
    def metrics(self) -> dict[str, float]:
        """The means of what set_metrics() was given so far: on rank 0 over all ranks, elsewhere over this one.

        Values of other ranks from the last half second may be missing. Local, does not block.
        """
        self._report()
        return self._gazette.means(self._column)

    def set_metrics(self, **values: float | Tensor) -> None:
        """Give this rank's values of this step (loss=loss). Local.

        The bar shows the mean over all ranks and steps so far. Ranks may give different names, and not equally often.
        Tensors on a device are read about twice a second, not in every step.

        Args:
            values: Numbers or tensors of one element, by name.

        Raises:
            UsageError: A tensor has several elements.
        """
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + _number(name, value), count + 1)
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._gazette.pause
            self._report()
            self._show(lambda bar: bar.set_postfix(self._gazette.means(self._column), refresh=False))

    def update(self, n: int = 1) -> None:
        """Count steps that are done; iterating does it by itself. Local.

        Args:
            n: How many steps.
        """
        if self._bar is not None:
            self._show(lambda bar: bar.update(n))

    def write(self, text: str) -> None:
        """Print a line on rank 0, above the bar if there is one. Local; other ranks print nothing.

        Args:
            text: The line.
        """
        if self._bar is not None:
            self._show(lambda bar: bar.write(text))
        elif self._context.world.rank == 0:
            printing.print_to(sys.stdout, text + "\n")

    def close(self) -> None:
        """Show the last figures and leave the bar as it is. Local; a second call does nothing."""
        self._report()
        self._show(lambda bar: bar.set_postfix(self._gazette.means(self._column), refresh=False))
        self._show(lambda bar: bar.close())
        self._bar = None

    def __iter__(self) -> Iterator[T]:
        try:
            for each in self._iterable:
                yield each
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __enter__(self) -> Progress[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self, act: Callable[[Any], object]) -> None:
        if self._bar is None:
            return
        try:
            act(self._bar)
        except Exception as error:
            self._bar = None
            logger.debug("the progress bar is gone: %s", error)

    def _report(self) -> None:
        sums = {name: (float(total), count) for name, (total, count) in self._sums.items()}
        self._sums = {}
        if sums and is_running() and current() is self._context:
            self._gazette.report(self._column, sums)


@overload
def progress(
    iterable: Iterable[T],
    desc: str | None = None,
    total: float | None = None,
    *,
    disable: bool | None = None,
    **options: Any,
) -> Progress[T]: ...
@overload
def progress(
    iterable: None = None,
    desc: str | None = None,
    total: float | None = None,
    *,
    disable: bool | None = None,
    **options: Any,
) -> Progress[Any]: ...
@untraced
def progress(
    iterable: Iterable[T] | None = None,
    desc: str | None = None,
    total: float | None = None,
    *,
    disable: bool | None = None,
    **options: Any,
) -> Progress[T]:
    """Return a progress bar around `iterable`, shown by tqdm on rank 0 alone; the others just iterate.

    Give values with set_metrics(loss=loss, ...): the bar shows means over all ranks, which send theirs to rank 0 about
    twice a second, without waiting. Bars are matched between ranks by desc and their order.
    Local, does not block; ranks may have different numbers of steps. Without tqdm nothing is shown.

    Args:
        iterable: What to loop over. Default: nothing; call update() yourself.
        desc: Text before the bar.
        total: Number of steps, where `iterable` has no length.
        disable: None: show no bar where rank 0's output is not a terminal (mpirun's counts). False: always show it.
            True: never.
        options: Other keywords of tqdm.tqdm.

    Returns:
        The bar: an iterable with update(), set_metrics(), write() and close().

    Raises:
        NotInitializedError: init() has not been called.
        UsageError: `iterable` is not iterable.

    Example:
        for batch in (bar := hvd.progress(loader, "training")):
            bar.set_metrics(loss=train(batch))

    Source: tqdm.tqdm.
    """
    if iterable is not None and not hasattr(iterable, "__iter__"):
        raise WrongTypeError(f"progress expects something to iterate over, got {type(iterable).__name__}.")
    rank = current().world.rank
    bar = None if rank or disable else _bar(iterable, desc, total, force=disable is False, options=options)
    return Progress(() if iterable is None else iterable, desc or "", bar)


def _bar(iterable: Iterable[Any] | None, desc: str | None, total: float | None, *, force: bool, options: Any) -> Any:
    columns = columns_of_terminal()
    if columns is None and not force:
        return None
    if find_spec("tqdm") is None:
        logger.info("progress shows no bar: tqdm is not installed (pip install tqdm).")
        return None
    if total is None:
        total = _length_of(iterable)
    tqdm = import_module("tqdm").tqdm
    given = {"ncols": columns, **options}
    try:
        # What mpirun passes on has no size of its own.
        return tqdm(desc=desc, total=total, **given)
    except (KeyError, TypeError):
        # Words that tqdm does not know.
        raise
    except Exception as error:
        logger.debug("progress shows no bar: %s", error)
        return None


@only_looks(None)
def _length_of(iterable: Any) -> int | None:
    """Of a DataLoader over an iterable dataset nobody knows it: it has a __len__ that raises."""
    return len(iterable)


def _number(name: str, value: float | Tensor) -> float | Tensor:
    """Return a value to add up; a tensor on a device stays there."""
    found = _read(value)
    if found is None:
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"tensor of shape {_shape_of(value)}"
        raise UsageError(f"progress: {name} is a {what}, expected one element or a number: take its mean.")
    return found


@only_looks(None)
def _read(value: float | Tensor) -> float | Tensor | None:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        return None
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    dense = dense.reshape(())
    return float(dense) if dense.device.type == "cpu" else dense.float()


@only_looks("unknown")
def _shape_of(value: Tensor) -> str:
    return str(tuple(value.shape))
