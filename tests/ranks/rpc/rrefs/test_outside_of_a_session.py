"""RRefs before init_rpc and after shutdown."""

import gc
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rpc.values import Tracked, give_back, keep, let_go, wait_until_freed

NOT_SET = r"Current RPC agent is not set! Did you initialize the RPC framework \(e\.g\. by calling `rpc\.init_rpc`\)\?"


@pytest.fixture
def session(rpc: ModuleType, hvd: ModuleType) -> Any:
    """Ends the session that the test runs in, and the next one begins."""

    def renew() -> None:
        rpc.init_rpc(f"worker{hvd.rank()}")

    return renew


def test_users_and_owners_after_shutdown(rpc: ModuleType, hvd: ModuleType, peer: int, session: Any) -> None:
    here, there = rpc.RRef([1]), rpc.remote(peer, torch.ones, (2,))
    sent = rpc.RRef(2)
    rpc.rpc_sync(peer, give_back, (sent,))
    rpc.shutdown()
    if not there.is_owner():
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion\."):
            there.to_here()
    assert here.local_value() == [1]
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        there.rpc_sync().size()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.remote(peer, torch.ones, (2,))
    with pytest.raises(RuntimeError, match=NOT_SET):
        rpc.RRef(1)
    assert there.owner_name() == f"worker{peer}"
    assert str(there)
    session()
    # Those of an earlier session stay dead in the next one.
    if not there.is_owner():
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion\."):
            there.to_here()
    with pytest.raises(RuntimeError, match=r"Cannot call fork an UserRRef after deletion\."):
        rpc.rpc_sync(peer, give_back, (there,))
    del there
    assert rpc.remote(peer, max, (1, 2)).to_here() == 2


@pytest.mark.mpi(min_size=2)
def test_shutdown_frees_what_is_still_held(
    rpc: ModuleType, hvd: ModuleType, peer: int, name: str, session: Any
) -> None:
    held = rpc.remote(peer, Tracked, (name,))
    cycle: list[Any] = [rpc.remote(peer, Tracked, (name + " in a cycle",))]
    cycle.append(cycle)
    del cycle
    rpc.rpc_sync(peer, keep, (name, rpc.RRef(Tracked(name + " kept"))))
    rpc.shutdown()
    for tracked in (name, name + " in a cycle"):
        assert wait_until_freed(tracked.replace(f" {hvd.rank()}", f" {(hvd.rank() - 1) % hvd.size()}"))
    session()
    rpc.rpc_sync(peer, let_go, (name,))
    if held.is_owner():
        assert isinstance(held.local_value(), Tracked)
    gc.collect()


def test_leaks_are_named_where_they_are_looked_for(
    rpc: ModuleType, hvd: ModuleType, peer: int, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvlike.rpc.rrefs.lifetime import Lifetime
    from hvlike.rpc.rrefs.session import checks_leaks

    rref = rpc.remote(peer, give_back, ([1],))
    rref.to_here()
    hvd.barrier()
    assert checks_leaks()
    monkeypatch.setattr(Lifetime, "drop_all", lambda lifetime: None)
    if rref.is_owner():
        rpc.shutdown()
    else:
        with pytest.raises(RuntimeError, match=r"(?s)Leaking RRef.*give_back.*held by worker"):
            rpc.shutdown()
    monkeypatch.undo()
    session()
