"""Which RRefs live, who made them and who holds them: for rpc.statistics and the report of a shutdown."""

from __future__ import annotations

from dataclasses import dataclass

from hvlike.rpc.rrefs.entry import Entry
from hvlike.rpc.rrefs.identity import GlobalId
from hvlike.rpc.rrefs.session import Session


@dataclass(frozen=True)
class LiveRRef:
    """A value that this worker keeps because others may ask for it."""

    id: GlobalId
    owner: str
    creator: str
    """The worker that called remote() or RRef()."""
    what: str
    """The function that makes the value; for RRef(value) the type of the value."""
    settled: bool
    """False while the value is computed."""
    forks: int
    """How many RRefs of other workers the owner knows of."""
    holders: tuple[str, ...]
    """The workers that have them."""

    def __str__(self) -> str:
        made = f"{self.what or 'a value still unknown'}, made for {self.creator}"
        held = f"held by {', '.join(self.holders)} ({self.forks} in all)" if self.holders else "still computed"
        return f"{self.id} on {self.owner} ({made}): {held}"


def live(session: Session) -> list[LiveRRef]:
    """The values in this worker's table, in the order of their names."""
    with session.lock:
        entries = sorted(session.lifetime.owned.entries.values(), key=lambda entry: entry.id)
        return [_describe(session, entry) for entry in entries]


def debug_info(session: Session) -> dict[str, str]:
    """Counts under torch's names; num_user_rrefs is of our own."""
    with session.lock:
        entries = list(session.lifetime.owned.entries.values())
        forks = list(session.lifetime.used.forks.values())
        return {
            "num_owner_rrefs": str(len(entries)),
            "num_forks": str(sum(len(entry.holders) for entry in entries)),
            "num_pending_users": str(sum(not fork.confirmed for fork in forks)),
            "num_user_rrefs": str(len(forks)),
            "num_pending_futures": str(sum(len(entry.waiting) for entry in entries)),
        }


def _describe(session: Session, entry: Entry) -> LiveRRef:
    workers = session.agent.workers
    ranks = sorted({holder.rank for holder in entry.holders.values()})
    what = entry.what
    if not what and entry.settled:
        what = f"{type(entry.value).__module__}.{type(entry.value).__qualname__}"
    return LiveRRef(
        id=entry.id,
        owner=session.agent.me.name,
        creator=workers[entry.id.created_on].name,
        what=what,
        settled=entry.settled,
        forks=len(entry.holders),
        holders=tuple(workers[rank].name for rank in ranks),
    )
