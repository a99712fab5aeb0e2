"""The state of a federation: slots, leases, progress, verdicts and credits, from a bounded number of requests.

What object names show is taken from listings, which return a thousand names per request; who has a slot is read from
the signed metadata. At most MOST_READ leases are read, and the latest refusals.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from atoll.errors import InputError, plural, printable
from atoll.federation.charter import Charter, Slot
from atoll.federation.lease import Lease, clock
from atoll.federation.roles import NUM_REQUESTS, Accepted, Federation
from atoll.federation.submission import Key, list_submissions
from atoll.federation.verify import Verdict, count_votes, is_refused, list_verdicts, read_verdict

MOST_READ = 1000  # leases
MOST_VERDICTS = 20  # refusals whose reason is shown
IN_A_TABLE = 40  # slots on a terminal
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class SlotStatus:
    slot: Slot
    state: str  # accepted, pending, training, refused, revoked or wanted
    lease: Lease | None = None
    beat: float = 0.0  # seconds since the last heartbeat
    expert: Accepted | None = None
    pending: int = 0
    accepts: int = 0  # of the submission with most of them
    rejects: int = 0


@dataclass(frozen=True)
class Status:
    url: str
    fingerprint: str
    charter: Charter
    verifiers: list[str]
    founders: list[str]
    num_verdicts: int
    expires: datetime
    slots: list[SlotStatus]
    submissions: int
    refusals: list[Verdict]
    shares: dict[int, float] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return Counter(slot.state for slot in self.slots)


def read_status(federation: Federation) -> Status:
    """Reads the status from the store."""
    store, charter = federation.store, federation.charter
    slots = federation.slots()
    experts = federation.experts(slots)
    submissions, verdicts = list_submissions(store), list_verdicts(store)
    leases, beats = _leases(federation, slots)
    by_slot: dict[int, list[Key]] = defaultdict(list)
    for key in submissions:
        by_slot[key.slot].append(key)

    def describe(slot: Slot) -> SlotStatus:
        number = slot.number
        expert, lease = experts.get(number), leases.get(number)
        known = () if expert is None else (expert.submission, *expert.previous)
        votes = {key: verdicts[key] for key in by_slot[number] if key.id not in known}
        pending = [count_votes(federation, own) for own in votes.values() if not is_refused(federation, own)]
        active = lease is not None and not lease.released and beats[number] <= charter.lease
        state = (
            "revoked" if number in federation.revoked else "accepted" if expert is not None
            else "pending" if pending else "training" if active else "refused" if votes else "wanted"
        )  # fmt: skip
        best = max(pending, default=(0, 0))
        return SlotStatus(
            slot, state, lease if active else None, beats.get(number, 0.0), expert, len(pending), best[0],
            len(votes) - len(pending),
        )  # fmt: skip

    refused = [vote for votes in verdicts.values() for vote in votes if not vote.accepted][:MOST_VERDICTS]
    found = _parallel(refused, lambda vote: read_verdict(federation, vote))
    return Status(
        federation.place, federation.fingerprint, charter, federation.verifiers, federation.founders,
        federation.num_verdicts, federation.timestamp.signed.expires, [describe(slots[n]) for n in sorted(slots)],
        len(submissions), sorted(found.values(), key=lambda verdict: verdict.judged, reverse=True),
    )  # fmt: skip


def _leases(federation: Federation, slots: dict[int, Slot]) -> tuple[dict[int, Lease], dict[int, float]]:
    """Returns the leases of slots, and the seconds since their last heartbeats by the store's clock."""
    store = federation.store
    written = store.list_modified("leases")
    names = {int(name): time for key, time in written.items() if (name := key[7:-5]).isdecimal() and int(name) in slots}
    latest = sorted(names, key=lambda number: names[number], reverse=True)[:MOST_READ]
    now = max(names.values(), default=0.0)
    with suppress(InputError):  # with read access only, the latest heartbeat stands for the present time
        now = clock(store) if latest else now
    leases = _parallel(latest, lambda number: Lease.read(store, number)[0])
    return {n: lease for n, lease in leases.items() if lease is not None}, {n: now - names[n] for n in names}


def _parallel(keys: list[K], read: Callable[[K], V]) -> dict[K, V]:
    """Reads several objects in parallel; unreadable ones are left out."""
    found: dict[K, V] = {}

    def get(key: K) -> None:
        with suppress(InputError, FileNotFoundError):
            found[key] = read(key)

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(get, keys))
    return {key: found[key] for key in keys if key in found}


def render_text(status: Status) -> list[str]:
    """Returns the status for a terminal."""
    charter, counts = status.charter, status.counts
    lines = [
        f"{charter.name}: {plural(len(status.slots), 'slot')}, {plural(status.submissions, 'submission')}; "
        + ", ".join(f"{num} {state}" for state, num in sorted(counts.items())),
        f"root {status.fingerprint}; {plural(len(status.verifiers), 'verifier')}, {status.num_verdicts} needed; "
        f"signed until {status.expires:%Y-%m-%d %H:%M} UTC; data licence {charter.license}",
        "",
        f"{'slot':>5}  {'state':9}  {'images':>8}  {'who':16}  {'what':30}  licence",
    ]
    for slot in status.slots[:IN_A_TABLE]:
        who, what, license = describe_slot(slot, status.num_verdicts)
        share = f", leads {status.shares[slot.slot.number]:.0%}" if slot.slot.number in status.shares else ""
        what, images = (what + share)[:44], f"{slot.slot.images:,}"
        lines.append(f"{slot.slot.number:5}  {slot.state:9}  {images:>8}  {who[:16]:16}  {what:30}  {license}")
    if len(status.slots) > IN_A_TABLE:
        lines.append(f"       ... and {len(status.slots) - IN_A_TABLE} more: --html shows all")
    for verdict in status.refusals[:5]:
        lines.append(printable(f"refused {verdict.submission[:12]} (slot {verdict.slot}): {verdict.reason}", 240))
    hint = {
        "wanted": f"atoll federation train {status.url}", "pending": f"atoll federation verify {status.url}",
        "accepted": f'atoll sample {status.url} "a prompt"',
    }  # fmt: skip
    return [*lines, *(f"next: {hint[state]}" for state in hint if counts[state])]


def describe_slot(slot: SlotStatus, needed: int) -> tuple[str, str, str]:
    """Returns who works on a slot, its progress, and its licence."""
    if slot.expert is not None:
        about = slot.expert.about
        more = f", {slot.pending} pending" if slot.pending else ""
        return (
            str(about.get("name", "")),
            f"{about.get('objective')}, {about.get('steps'):,} steps{more}",
            str(about.get("license", "")),
        )
    if slot.state == "pending":
        return "", f"{plural(slot.pending, 'submission')}, {slot.accepts} of {needed} verdicts", ""
    if slot.lease is not None:
        share = slot.lease.step / max(1, slot.lease.steps)
        return slot.lease.holder.name, f"step {slot.lease.step:,} of {slot.lease.steps:,} ({share:.0%})", ""
    if slot.state == "revoked":
        return "", "its verifiers were revoked: to be verified again", ""
    return (
        "",
        f"{plural(slot.rejects, 'submission')} refused" if slot.rejects else "wants an expert",
        slot.slot.license or "",
    )
