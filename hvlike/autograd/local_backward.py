"""The part of a backward pass that one worker does: which nodes of its graph can run, and running them.

Nothing is sent from here. What comes from other workers is told with `resolve`, what has to go to them is told by
calling `emit`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from hvlike.autograd.distributed_context import Recv, Send

Emit = Callable[["Recv", "list[Tensor | None] | None"], None]


class LocalBackward:
    """One backward pass on one worker. Not thread-safe: the caller holds the context's lock during every call.

    engage -> (resolve*, step)* until `finished`. After an exception the object is of no more use, and has let go of
    everything it put anywhere.
    """

    def __init__(
        self,
        sends: Mapping[int, Send],
        recvs: Mapping[int, Recv],
        gradients: dict[Tensor, Tensor],
        emit: Emit,
        *,
        retain_graph: bool = False,
        waits_for: Collection[int] | None = None,
    ) -> None:
        """sends, recvs: those of the context, by message id; copied. gradients: the context's, by leaf; added to.

        emit: called exactly once for each of the recvs, in any thread and from inside of autograd's engine too, so it
        may only put things into a queue. Its second argument is the gradients of the recv's tensors; None where the
        recv is not reached by this backward; a list of nothing but None where it is reached and got nothing.
        retain_graph: as for torch. waits_for: the sends that `resolve` will be called for; None means all.
        """
        raise NotImplementedError

    def engage(self, roots: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        """Look through the graph below the roots and sends; once, before anything else. Runs nothing.

        roots: edges and their gradients; empty where the backward was begun on another worker. The caller keeps the
        graph below them alive until it is finished. Emits None for recvs that are not reached.
        """
        raise NotImplementedError

    def resolve(self, message: int, gradients: Sequence[Tensor | None] | None) -> None:
        """Take the gradients of what was sent in a message, in order of Send.edges; None: there are none, ever.

        Runs nothing. A message that is not waited for, or no more, is ignored.
        """
        raise NotImplementedError

    def add_recv(self, recv: Recv) -> None:
        """Emit None for a recv that was recorded after `engage`."""
        raise NotImplementedError

    def step(self) -> None:
        """Run what can run now; best after all messages that are there have been resolved: it makes fewer segments.

        During the call `recv.run` of the recvs is this object, whose method `ran` the Receive function calls.
        Raises: whatever the code of the user and of autograd raises.
        """
        raise NotImplementedError

    def ran(self, recv: Recv, gradients: Sequence[Tensor | None]) -> None:
        """Called by the Receive function's backward, in the engine's thread, with the gradients of its outputs."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Everything has run: each recv was emitted, each gradient of a leaf is in the context's map."""
        raise NotImplementedError
