"""Verifies submissions: judges pending ones, signs verdicts, and signs the next metadata of their slots.

STORE/verdicts/ID.SLOT.KEY.PRESENT.accept.json (or reject)  a signed verdict; PRESENT is the expert it was compared with
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from atoll.cards import Card, Count
from atoll.errors import InputError, StoreError, printable
from atoll.federation.charter import Blob
from atoll.federation.create import data_folder
from atoll.federation.credits import training_flops
from atoll.federation.gate import Limits
from atoll.federation.judge import Judgement, judge
from atoll.federation.keys import Digest, Identity, Person, seal, unseal
from atoll.federation.roles import Accepted, AlteredError, Federation
from atoll.federation.submission import (
    CHECKPOINTS,
    MAX_MANIFEST,
    Key,
    Submission,
    author_of,
    check_license,
    check_submission,
    claims_of,
    list_submissions,
    read_submission,
    summary,
)
from atoll.networks.stored import WEIGHTS
from atoll.object_store import Store

MOST_OTHERS = 8  # experts of other slots that a submission is judged with
NONE = "0" * 16  # for the present expert, if there is none


class OwnFaultError(InputError):
    """Raised for faults in the verifier's own files."""


class Verdict(Card):
    """A verifier's signed judgement of a submission."""

    author: Person  # the verifier
    submission: Digest
    slot: Count
    present: str  # the submission that it was compared with
    accepted: bool
    reason: str
    figures: dict[str, Any]
    about: dict[str, Any]  # its summary in the signed metadata, if accepted
    judged: str  # a date


class VerdictKey(NamedTuple):
    """The object key of a verdict. Anyone may have written it: only signatures count."""

    submission: str
    slot: int
    verifier: str
    present: str
    accepted: bool

    def __str__(self) -> str:
        end = "accept" if self.accepted else "reject"
        return f"verdicts/{self.submission}.{self.slot:04d}.{self.verifier}.{self.present}.{end}.json"


def list_verdicts(store: Store) -> dict[Key, list[VerdictKey]]:
    """Returns the keys of all verdicts, by submission."""
    verdicts = defaultdict(list)
    for key, _ in store.list("verdicts"):
        parts = key.removeprefix("verdicts/").split(".")
        if len(parts) == 6 and parts[1].isdecimal() and parts[4] in ("accept", "reject"):
            name, slot = parts[0], int(parts[1])
            verdicts[Key(name, slot)].append(VerdictKey(name, slot, parts[2], parts[3], parts[4] == "accept"))
    return verdicts


def read_verdict(federation: Federation, key: VerdictKey) -> Verdict:
    """Returns a verdict; raises InputError unless a verifier has signed it."""
    verdict = unseal(federation.store.get(str(key), MAX_MANIFEST), Verdict, str(key))
    if verdict.author.key not in federation.verifiers:
        raise InputError(f"{key} is signed by {verdict.author.name}, who is no verifier")
    if (verdict.submission, verdict.slot, verdict.accepted) != (key.submission, key.slot, key.accepted):
        raise InputError(f"{key} is not what its name says")
    return verdict


def verify(
    federation: Federation, identity: Identity, *, limits: Limits | None = None, only: int | None = None
) -> list[str]:
    """Judges all submissions that this verifier has not judged; returns lines for the user. Rerun it to resume."""
    federation.renew(identity)
    federation.require_verifier(identity)
    lines = []
    if num := federation.finish_proposals(identity):
        lines.append(f"published what others had signed: {num}")
    submissions = [key for key in list_submissions(federation.store) if only in (None, key.slot)]
    verdicts = list_verdicts(federation.store)
    present = federation.experts({key.slot for key in submissions})
    pending = [key for key in submissions if is_pending(key, present.get(key.slot), verdicts[key], identity.key)]
    for key in set(submissions) - set(pending):
        lines += sign_again(federation, identity, key, present.get(key.slot), verdicts[key])
    dated = []
    for key in pending:
        try:
            dated.append((read_submission(federation, key).submitted, key))
        except StoreError:
            raise
        except InputError:
            dated.append(("", key))
    for _, key in sorted(dated, key=lambda pair: (pair[0], str(pair[1]))):
        lines += judge_one(federation, identity, key, limits)
    if not pending:
        lines.append(f"nothing is pending in {federation.place}")
    next_line = (
        f'atoll sample {federation.place} "a prompt"' if pending else f"atoll federation status {federation.place}"
    )
    return [*lines, f"next: {next_line}"]


def is_pending(key: Key, present: Accepted | None, verdicts: Sequence[VerdictKey], verifier: str) -> bool:
    """Returns whether a verifier has yet to judge a submission.

    One that was accepted in comparison with another expert than the present one is judged again, unless it has or had
    the slot.
    """
    own = [verdict for verdict in verdicts if verdict.verifier == verifier[:16]]
    if present is not None and key.id in (present.submission, *present.previous):
        return False
    base = NONE if present is None else present.submission[:16]
    return all(verdict.accepted and verdict.present != base for verdict in own)


def count_votes(federation: Federation, verdicts: Sequence[VerdictKey]) -> tuple[int, int]:
    """Returns how many verifiers have accepted and refused, each counted once, from the keys of their verdicts."""
    voters = {key[:16] for key in federation.verifiers}
    accepts = {vote.verifier for vote in verdicts if vote.accepted and vote.verifier in voters}
    rejects = {vote.verifier for vote in verdicts if not vote.accepted and vote.verifier in voters}
    return len(accepts - rejects), len(rejects)


def is_refused(federation: Federation, verdicts: Sequence[VerdictKey]) -> bool:
    """Returns whether too many have refused a submission for it to be accepted."""
    return count_votes(federation, verdicts)[1] > len(federation.verifiers) - federation.num_verdicts


def sign_again(
    federation: Federation, identity: Identity, key: Key, present: Accepted | None, verdicts: Sequence[VerdictKey]
) -> list[str]:
    """Signs again for a submission that this verifier has accepted, in case the metadata has changed since."""
    if present is not None and key.id in (present.submission, *present.previous):
        return []
    own = [verdict for verdict in verdicts if verdict.verifier == identity.key[:16]]
    if not own or not all(verdict.accepted for verdict in own):
        return []
    verdict = read_verdict(federation, own[-1])
    return [accept(federation, identity, key, verdict.about)] if verdict.author.key == identity.key else []


def judge_one(federation: Federation, identity: Identity, key: Key, limits: Limits | None) -> list[str]:
    """Judges a submission and signs the verdict."""
    present = federation.expert(key.slot)
    submission: Submission | None = None
    about: dict[str, Any] = {}
    try:
        submission = read_submission(federation, key)
        judgement, about = _judge(federation, key, submission, present, limits)
    except (StoreError, OwnFaultError):
        raise  # which says nothing about the submission
    except AlteredError as error:  # nor does this: anyone with access could else ruin another's submission for good
        what = f"submission {key.id[:12]} is refused: {printable(str(error), 500)}"
        return [f"slot {key.slot}: {what}; no verdict is signed, for its author can upload it again"]
    except InputError as error:
        judgement = Judgement(accepted=False, reason=printable(str(error), 500), figures={})
    base = NONE if present is None else present.submission[:16]
    verdict = Verdict(
        author=identity.person, submission=key.id, slot=key.slot, present=base, accepted=judgement.accepted,
        reason=judgement.reason, figures=judgement.figures, about=about,
        judged=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    name = VerdictKey(key.id, key.slot, identity.key[:16], base, judgement.accepted)
    federation.store.put(str(name), seal(verdict, identity))
    who = submission.author.name if submission is not None else "somebody"
    word = "accepted" if judgement.accepted else "refused"
    lines = [f"slot {key.slot}: submission {key.id[:12]} of {who} {word}: {judgement.reason}"]
    if judgement.accepted and submission is not None:
        lines.append(accept(federation, identity, key, about))
    return lines


def accept(federation: Federation, identity: Identity, key: Key | None, about: dict[str, Any], slot: int = -1) -> str:
    """Signs that a submission gets its slot, or that a slot has no expert; publishes it if enough have signed."""
    number = slot if key is None else key.slot
    federation.refresh()
    size = 0 if key is None else federation.store.head(str(key))[0]
    metadata = federation.next_bin(number, None if key is None else (key.id, size), about)
    num, published = federation.sign_bin(identity, number, metadata)
    if published:
        return f"slot {number}: signed by {num} of {federation.num_verdicts} verifiers and published"
    if num >= federation.num_verdicts:
        return f"slot {number}: another submission came first, this one is judged again the next time"
    return f"slot {number}: signed by {num} of the {federation.num_verdicts} verifiers that are needed"


def _judge(
    federation: Federation, key: Key, submission: Submission, present: Accepted | None, limits: Limits | None
) -> tuple[Judgement, dict[str, Any]]:
    slot = federation.slot(key.slot)
    check_license(federation.charter, slot.license, submission.license)
    if slot.author is not None and slot.author.key != submission.author.key:
        raise InputError(f"slot {slot.number} is of {slot.author.name}'s own images: only they can train for it")
    author = author_of(federation.store, submission.files[WEIGHTS].sha256)
    if author is not None and author.key != submission.author.key:
        raise InputError(f"the weights are a copy: {author.name} ({author.key[:8]}) was the first to sign for them")
    with TemporaryDirectory(prefix="atoll-") as place:
        folder = download_expert(federation, submission, Path(place) / "submission", checkpoints=True)
        unseen = slot.is_private  # then any other slot defines latents and texts
        data = data_folder(federation, federation.charter.slots[0] if unseen else slot)
        others = [fetch_expert(federation, entry) for entry in neighbours(federation, key.slot)]
        before = None if present is None else fetch_expert(federation, present)
        if before is not None and present is not None and present.about.get("author") != submission.author.key:
            others.append(before)  # of which it must not be a copy
        try:
            judgement = judge(
                folder, slot=key.slot, gate=federation.charter.gate, data=data, present=before, others=others,
                limits=limits, private=submission.private, like=0 if unseen else None,
            )  # fmt: skip
        except InputError as error:
            raise OwnFaultError(str(error)) from error
        if not judgement.accepted:
            return judgement, {}
        for name, value in claims_of(folder).items():
            if getattr(submission, name) != value:
                claimed = printable(str(getattr(submission, name)), 60)
                raise InputError(f"its manifest claims {name} {claimed}, but its card says {value}")
        return judgement, summary(submission, flops=int(training_flops(folder)))


def download_expert(federation: Federation, submission: Submission, folder: Path, checkpoints: bool = False) -> Path:
    """Downloads the files of a submission, each checked against its length and SHA-256."""
    files = {name: blob for name, blob in submission.files.items() if checkpoints or not name.startswith(CHECKPOINTS)}
    federation.fetch_files(files, folder, f"download expert {submission.slot}")
    return folder


def neighbours(federation: Federation, slot: int) -> list[Accepted]:
    """Returns the accepted experts of some other slots: the ensemble that a new expert joins, for its samples."""
    accepted = federation.experts(number for number in federation.slots() if number != slot)
    return sorted(accepted.values(), key=lambda entry: abs(entry.slot - slot))[:MOST_OTHERS]


def fetch_expert(federation: Federation, entry: Accepted) -> Path:
    """Returns the folder of an accepted expert; its manifest is what verifiers have signed, byte for byte."""
    folder = federation.cache / "experts" / entry.submission[:24]
    path = federation.fetch(f"submissions/{entry.slot:04d}.json", Blob(sha256=entry.submission, size=entry.size))
    submission = check_submission(federation, path.read_bytes(), Key(entry.submission, entry.slot))
    return download_expert(federation, submission, folder)


def roll_back(federation: Federation, identity: Identity, slot: int, to: str | None = None) -> str:
    """Rolls a slot back to the expert before the present one, to one with a given id, or with `none` to no expert."""
    federation.renew(identity)
    federation.require_verifier(identity)
    federation.slot(slot)
    present = federation.expert(slot)
    if to == "none" and present is not None:
        return accept(federation, identity, None, {}, slot)
    before = () if present is None else present.previous
    known = before[:1] if to is None else [key.id for key in list_submissions(federation.store) if key.slot == slot]
    matches = [name for name in known if name.startswith(to or "")]
    if len(matches) != 1:
        names = ", ".join(name[:12] for name in before) or "none"
        raise InputError(f"there is no one submission to roll slot {slot} back to: before were {names}")
    key = Key(matches[0], slot)
    return accept(federation, identity, key, summary(read_submission(federation, key)))
