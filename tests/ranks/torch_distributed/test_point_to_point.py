"""Tensors between two members of a group: every dtype and layout arrives, in order, and nothing waits for ever."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from support.backends.late_device import LateDevice
from support.pretended_nodes import nodes_of

from hvlike.backends.cuda import runtime
from hvlike.collectives.session.context import current
from hvlike.errors import MismatchError, ProcessGroupError, ShutdownError
from hvlike.torch_distributed import tensor_bytes
from hvlike.torch_distributed.endpoint import INLINE_BYTES, Transfer
from hvlike.torch_distributed.point_to_point import PointToPoint

SECONDS = 30.0
LARGE = (5 << 20) + 12  # Bytes: several pieces, of which the last is short
_keys = itertools.count()


class Pairs:
    """All ranks as one group; each speaks with the next one and the one before."""

    def __init__(self, hvd: ModuleType) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self.next, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.group = PointToPoint(current().fabric, f"test {next(_keys)}", range(self.size))

    def pass_on(self, sent: torch.Tensor, received: torch.Tensor, tag: int = 0) -> None:
        """Send to the next rank, receive from the one before."""
        incoming = self.group.recv(received, self.before, tag)
        outgoing = self.group.send(sent, self.next, tag)
        wait(incoming)
        wait(outgoing)


def wait(transfer: Transfer) -> Transfer:
    assert current().fabric.loop.wait(lambda: transfer.done, SECONDS), "a transfer hangs"
    if transfer.error is not None:
        raise transfer.error
    return transfer


# How the bytes go between ranks: by cross-memory attach; by MPI; by both.
@pytest.fixture(params=["memory", "mpi", "nodes"], scope="module")
def plane(request: pytest.FixtureRequest, hvd: ModuleType) -> Iterator[str]:
    if request.param == "memory":
        yield request.param
        return
    if request.param == "mpi":
        os.environ["HVLIKE_PEER_MEMORY"] = "0"
    with nodes_of(hvd, max(1, hvd.size() // 2) if request.param == "nodes" else None):
        yield request.param
        os.environ.pop("HVLIKE_PEER_MEMORY", None)


@pytest.fixture
def pairs(plane: str, hvd: ModuleType) -> Iterator[Pairs]:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    pairs = Pairs(hvd)
    yield pairs
    hvd.barrier()
    pairs.group.close(ShutdownError("the test is over"))


def test_all_lengths_arrive(pairs: Pairs) -> None:
    for nbytes in (0, 1, INLINE_BYTES, INLINE_BYTES + 1, 1 << 20, LARGE):
        sent = torch.arange(nbytes).add(pairs.rank).to(torch.uint8)
        received = torch.zeros(nbytes, dtype=torch.uint8)
        pairs.pass_on(sent, received)
        assert torch.equal(received, torch.arange(nbytes).add(pairs.before).to(torch.uint8)), nbytes


DTYPES = [torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("elements", [7, 100_000])
def test_all_dtypes_arrive(pairs: Pairs, elements: int) -> None:
    for dtype in DTYPES:
        sent = torch.arange(elements).remainder(2 + pairs.rank).to(dtype)
        received = torch.zeros(elements, dtype=dtype)
        pairs.pass_on(sent, received)
        expected = torch.arange(elements).remainder(2 + pairs.before).to(dtype)
        assert torch.equal(received.view(torch.uint8), expected.view(torch.uint8)), dtype


def filled(shape: tuple[int, ...], value: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + value


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: base.t(),
    "every second column": lambda base: base[:, ::2],
    "a slice": lambda base: base[3:7],
    "expanded": lambda base: base[:1, :1].expand(4, 5),
    "requires grad": lambda base: base.clone().requires_grad_(),
    "a number": lambda base: base[0, 0],
}


@pytest.mark.parametrize("side", [8, 200])
def test_views_arrive_by_their_elements(pairs: Pairs, side: int) -> None:
    for layout in LAYOUTS:
        pass_on_views(pairs, layout, side)


def pass_on_views(pairs: Pairs, layout: str, side: int) -> None:
    sent = LAYOUTS[layout](filled((side, side), pairs.rank))
    expected = LAYOUTS[layout](filled((side, side), pairs.before)).detach()
    contiguous = torch.zeros(expected.shape)
    pairs.pass_on(sent, contiguous)
    assert torch.equal(contiguous, expected)
    if layout == "expanded":
        return
    base = torch.full((side, side), -1.0)
    received = LAYOUTS[layout](base)
    pairs.pass_on(sent, received)
    assert torch.equal(received, expected)
    if layout == "every second column":
        assert (base[:, 1::2] == -1).all()


def test_inference_mode_and_lazy_conjugates(pairs: Pairs) -> None:
    with torch.inference_mode():
        received = torch.zeros(6, 4).t()
    pairs.pass_on(filled((4, 6), pairs.rank), received)
    assert torch.equal(received, filled((4, 6), pairs.before))
    values = torch.complex(filled((5,), pairs.rank), filled((5,), 1))
    target = torch.zeros(5, dtype=torch.complex64).conj()
    pairs.pass_on(values.conj(), target)
    assert torch.equal(target, torch.complex(filled((5,), pairs.before), -filled((5,), 1)))


@pytest.mark.parametrize("elements", [3, LARGE // 4])
def test_order_and_tags(pairs: Pairs, elements: int) -> None:
    """By one tag in the order of the calls; another tag may be received before."""
    sends = [pairs.group.send(torch.full((elements,), number), pairs.next, number % 2) for number in range(4)]
    for tag in (1, 0):
        for number in (tag, tag + 2):
            received = torch.zeros(elements, dtype=torch.int64)
            assert wait(pairs.group.recv(received, pairs.before, tag)).source == pairs.before
            assert (received == number).all()
    for each in sends:
        wait(each)


def test_any_source_takes_all_that_come(pairs: Pairs) -> None:
    for elements in (2, LARGE // 4):
        if pairs.rank > 0:
            wait(pairs.group.send(torch.full((elements,), float(pairs.rank)), 0, elements))
            continue
        sources = set()
        for _ in range(pairs.size - 1):
            received = torch.zeros(elements)
            source = wait(pairs.group.recv(received, None, elements)).source
            assert (received == source).all()
            sources.add(source)
        assert sources == set(range(1, pairs.size))


def test_a_longer_receive_keeps_its_rest(pairs: Pairs) -> None:
    for elements in (3, 50_000):
        for received in (torch.full((elements + 4,), -1.0), torch.full((elements + 4, 2), -1.0)[:, 0]):
            pairs.pass_on(torch.full((elements,), float(pairs.rank)), received)
            assert (received[:elements] == pairs.before).all()
            assert (received[elements:] == -1).all()


def test_a_large_receive_that_is_too_short_is_an_error_on_both_ranks(pairs: Pairs) -> None:
    incoming = pairs.group.recv(torch.zeros(10), pairs.before, 3)
    outgoing = pairs.group.send(torch.zeros(100_000), pairs.next, 3)
    text = rf"rank {pairs.rank} .* from rank {pairs.before} \(tag 3,.* 40 bytes .* 400000 bytes"
    with pytest.raises(MismatchError, match=text):
        wait(incoming)
    with pytest.raises(MismatchError, match=rf"rank {pairs.next} received from rank {pairs.rank} \(tag 3"):
        wait(outgoing)
    received = torch.zeros(100_000)
    pairs.pass_on(torch.ones(100_000), received)
    assert received.all()


def test_a_small_send_that_did_not_fit_ends_what_waits_for_its_receiver(pairs: Pairs) -> None:
    """The send was done at once: what the sender waits for next would never come."""
    if pairs.rank == 0:
        wait(pairs.group.send(torch.zeros(4), 1))
        with pytest.raises(MismatchError, match=r"rank 1 received from rank 0 .* 8 bytes .* 16 bytes"):
            wait(pairs.group.recv(torch.zeros(1), 1))
    if pairs.rank == 1:
        with pytest.raises(MismatchError):
            wait(pairs.group.recv(torch.zeros(2), 0))


def test_what_cannot_be_meant_is_refused(pairs: Pairs) -> None:
    tensor = torch.zeros(2)
    with pytest.raises(ProcessGroupError, match="named itself"):
        pairs.group.send(tensor, pairs.rank)
    with pytest.raises(ProcessGroupError, match="named itself"):
        pairs.group.recv(tensor, pairs.rank)
    with pytest.raises(ProcessGroupError, match="negative"):
        pairs.group.send(tensor, pairs.next, -1)
    with pytest.raises(ProcessGroupError, match="ranks 0 to"):
        pairs.group.recv(tensor, pairs.size)
    with pytest.raises(ProcessGroupError, match="to_dense"):
        pairs.group.send(tensor.to_sparse(), pairs.next)


def test_messages_wait_for_the_group(pairs: Pairs, hvd: ModuleType) -> None:
    key = f"late {next(_keys)}"
    ranks = list(reversed(range(pairs.size)))
    if pairs.rank == 0:
        group = PointToPoint(current().fabric, key, ranks)
        transfers = [group.send(torch.full((n,), 5.0), ranks.index(1)) for n in (4, LARGE // 4)]
        hvd.barrier()
    else:
        hvd.barrier()
        group = PointToPoint(current().fabric, key, ranks)
        transfers = []
        if pairs.rank == 1:
            tensors = torch.zeros(4), torch.zeros(LARGE // 4)
            transfers = [group.recv(each, ranks.index(0)) for each in tensors]
            for each in transfers:
                wait(each)
            assert all((each == 5).all() for each in tensors)
    for each in transfers:
        wait(each)
    hvd.barrier()
    group.close(ShutdownError("over"))


def test_close_ends_what_is_pending_here_and_there(pairs: Pairs, hvd: ModuleType) -> None:
    key = f"closed {next(_keys)}"
    group = PointToPoint(current().fabric, key, range(pairs.size))
    hvd.barrier()
    waiting = group.recv(torch.zeros(3), pairs.before, 9)
    sending = group.send(torch.zeros(LARGE), pairs.next, 8)
    if pairs.rank == 0:
        group.close(ShutdownError("rank 0 is done"))
        with pytest.raises(ShutdownError, match="rank 0 is done"):
            wait(waiting)
        with pytest.raises(ShutdownError, match="rank 0 is done"):
            wait(sending)
        with pytest.raises(ShutdownError, match="rank 0 is done"):
            wait(group.send(torch.zeros(3), pairs.next))
    if pairs.next == 0:
        with pytest.raises(ShutdownError, match="rank 0 has destroyed the group"):
            wait(sending)
    hvd.barrier()
    group.close(ShutdownError("all are done"))


def test_lost_ranks_end_what_waits_for_them(pairs: Pairs, hvd: ModuleType) -> None:
    """What they have sent before can still be received."""
    if pairs.rank == 1:
        wait(pairs.group.send(torch.full((2,), 7.0), 0, 1))
    hvd.barrier()
    if pairs.rank == 0:
        pending = [pairs.group.recv(torch.zeros(2), source, 2) for source in (1, None)]
        pending.append(pairs.group.send(torch.zeros(LARGE), 1, 2))
        pairs.group.lose({1: RuntimeError("rank 1 is gone")})
        pending.append(pairs.group.recv(torch.zeros(2), 1, 2))
        for each in pending:
            with pytest.raises(RuntimeError, match="rank 1 is gone"):
                wait(each)
        received = torch.zeros(2)
        wait(pairs.group.recv(received, 1, 1))
        assert (received == 7).all()
    hvd.barrier()


def test_threads_send_and_receive_at_once(pairs: Pairs) -> None:
    errors: list[BaseException] = []

    def work(tag: int) -> None:
        try:
            for number in range(20):
                elements = (1, 3000, 40_000)[(number + tag) % 3]
                received = torch.zeros(elements)
                pairs.pass_on(torch.full((elements,), float(number + pairs.rank)), received, tag)
                assert (received == number + pairs.before).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors


def test_tensors_of_a_device_arrive_after_its_streams(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does nothing until somebody waits; tensors behind one of a device keep their order."""
    device = LateDevice()
    for elements in (3, 40_000):
        values, received = torch.zeros(elements), torch.zeros(2, elements)
        with monkeypatch.context() as patch:
            patch.setattr(tensor_bytes, "runtime_of", lambda kind: device)
            with device.use(device.new_stream(torch.device("cpu"))):
                values.fill_(1.0 + pairs.rank)
                incoming = pairs.group.recv(received[0], pairs.before)
                outgoing = pairs.group.send(values, pairs.next)
        behind = pairs.group.send(torch.full((elements,), -1.0), pairs.next)
        last = pairs.group.recv(received[1], pairs.before)
        for each in (incoming, last, outgoing, behind):
            wait(each)
        assert (received[0] == 1 + pairs.before).all()
        assert (received[1] == -1).all()
    assert runtime.runtime_of("cpu") is None
