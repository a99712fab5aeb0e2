"""Submissions: experts offered for a slot. Immutable, named by content hash, signed by their author.

STORE/submissions/ID.SLOT.json   the manifest in a signed envelope; ID is its SHA-256
STORE/blobs/SHA256.NAME          the files that it lists
STORE/authors/SHA256.json        who was the first to claim these weights, before anyone could see them
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from tqdm import tqdm

from atoll.cards import CONFIG, Card, Count, ExpertCard
from atoll.errors import InputError, printable
from atoll.federation.charter import Blob, Charter, Files
from atoll.federation.gate import Gate
from atoll.federation.keys import Digest, Identity, Person, seal, unseal
from atoll.federation.lease import Held
from atoll.federation.roles import AlteredError, Federation, sha256_of
from atoll.networks.expert import CALIBRATION
from atoll.networks.stored import WEIGHTS
from atoll.object_store import Store
from atoll.storage import digest_of, size_of

RUN, CHECKPOINTS = "run.json", "checkpoints"
PARTS = (CONFIG, WEIGHTS, CALIBRATION, RUN)
MAX_MANIFEST = 1 << 20  # bytes
FORMAT = 1


class Submission(Card):
    """The manifest of a submission."""

    format: int = FORMAT
    federation: Digest  # of the root that it was made for, so that it is valid in no other federation
    slot: Count
    author: Person
    contributors: list[Held] = Field(default_factory=list)  # who has worked on this run, the author last
    license: Annotated[str, Field(max_length=200)]
    objective: Annotated[str, Field(max_length=80)]
    model: Annotated[str, Field(max_length=80)]
    steps: Count
    samples: Count
    private: bool = False  # trained on images that only the author has
    submitted: str  # when training ended, by the author's clock
    files: Files


class Key(NamedTuple):
    """The object key of a submission."""

    id: str
    slot: int

    def __str__(self) -> str:
        return f"submissions/{self.id}.{self.slot:04d}.json"


def list_submissions(store: Store) -> list[Key]:
    """Returns all submissions, from their keys alone."""
    keys = []
    for key, size in store.list("submissions"):
        name, _, slot = key.removeprefix("submissions/").removesuffix(".json").partition(".")
        if len(name) == 64 and slot.isdecimal() and size <= MAX_MANIFEST:
            keys.append(Key(name, int(slot)))
    return keys


def blob_key(name: str, blob: Blob) -> str:
    return f"blobs/{blob.sha256}.{name.rpartition('/')[2]}"


def describe(files: Iterable[tuple[str, Path]]) -> Files:
    """Returns the hash and size of files."""
    return {name: Blob(sha256=digest_of(path), size=size_of(path)) for name, path in files}


def upload(
    store: Store, files: Sequence[tuple[str, Path]], what: str, *, again: bool = False, known: Files | None = None
) -> Files:
    """Uploads files as blobs, only missing ones unless `again`; returns their hashes and sizes."""
    found = known or describe(files)
    blobs = {name: (path, found[name]) for name, path in files}
    total = sum(blob.size for _, blob in blobs.values())
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, leave=False, delay=1) as bar:
        for name, (path, blob) in blobs.items():
            key = blob_key(name, blob)
            try:
                is_there = not again and store.head(key)[0] == blob.size
            except FileNotFoundError:
                is_there = False
            if not is_there:
                store.put_file(key, path)
            bar.update(blob.size)
    return found


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """Returns the files of a trained run that are submitted, with their names there."""
    parts = [(name, folder / name) for name in PARTS if (folder / name).is_file()]
    return [
        *parts,
        *((f"{CHECKPOINTS}/{path.name}", path) for path in sorted((folder / "state").glob("*.safetensors"))),
    ]


def submit(
    federation: Federation,
    identity: Identity,
    slot: int,
    folder: Path,
    *,
    license: str,
    held: list[Held],
    private: bool,
) -> Key:
    """Uploads an expert with its checkpoints and signs for it. The same expert gives the same submission.

    An existing one is uploaded again, in case somebody has damaged its files.
    """
    store, gate = federation.store, federation.charter.gate
    paths = [(name, path) for name, path in files_of(folder) if not (private and name.startswith(CHECKPOINTS))]
    check_sizes({name: Blob(sha256="0" * 64, size=size_of(path)) for name, path in paths}, gate)
    author = claim_weights(store, digest_of(folder / WEIGHTS), identity)
    if author.key != identity.key:
        raise InputError(
            f"{folder / WEIGHTS} is the expert that {author.name} ({author.key[:8]}) has submitted before: "
            "training is deterministic, so train with another --seed to make one of your own"
        )
    files = describe(paths)
    finished = datetime.fromtimestamp((folder / CONFIG).stat().st_mtime, UTC)
    submission = Submission(
        federation=sha256_of(federation.fingerprint.encode()), slot=slot, author=identity.person, contributors=held,
        license=license, **claims_of(folder), private=private, submitted=finished.isoformat(timespec="seconds"),
        files=files,
    )  # fmt: skip
    content = seal(submission, identity)
    key = Key(sha256_of(content), slot)
    upload(store, paths, "submit", again=store.exists(str(key)), known=files)
    store.put(str(key), content)
    return key


def claims_of(folder: Path) -> dict[str, Any]:
    """Returns what a manifest claims about an expert, from its card."""
    training = ExpertCard.read(folder).training or {}
    settings, counts = training.get("settings"), {name: training.get(name) for name in ("steps", "samples")}
    if not isinstance(settings, dict) or any(type(num) is not int or num < 0 for num in counts.values()):
        raise InputError(f"{CONFIG} does not say how the expert was trained: submit what training has written")
    return {"objective": str(settings.get("objective")), "model": str(settings.get("model")), **counts}


class Claim(Card):
    author: Person
    weights: Digest


def claim_weights(store: Store, digest: str, identity: Identity) -> Person:
    """Claims weights before they are uploaded; returns their author, who was the first to sign for them."""
    key = f"authors/{digest}.json"
    content = seal(Claim(author=identity.person, weights=digest), identity)
    if store.create(key, content):
        return identity.person
    return author_of(store, digest) or identity.person


def author_of(store: Store, digest: str) -> Person | None:
    """Returns who claimed these weights first; None if there is no validly signed claim."""
    key = f"authors/{digest}.json"
    try:
        claim = unseal(store.get(key, MAX_MANIFEST), Claim, key)
    except (InputError, FileNotFoundError):
        return None
    return claim.author if claim.weights == digest else None


def read_submission(federation: Federation, key: Key) -> Submission:
    """Returns a manifest; raises InputError unless its signature, name and sizes are right."""
    try:
        content = federation.store.get(str(key), MAX_MANIFEST)
    except FileNotFoundError as error:
        raise AlteredError(f"there is no submission {key.id[:12]} for slot {key.slot}") from error
    if sha256_of(content) != key.id:
        raise AlteredError(f"submission {key.id[:12]} was altered: it is not what its name says")
    return check_submission(federation, content, key)


def check_submission(federation: Federation, content: bytes, key: Key) -> Submission:
    """Returns the manifest in an envelope; raises InputError unless it fits the slot, the federation and the limits."""
    where = f"submission {key.id[:12]}"
    submission = unseal(content, Submission, where)
    if submission.slot != key.slot:
        raise InputError(f"{where} is for slot {submission.slot}, and lies in the place of one for slot {key.slot}")
    if submission.federation != sha256_of(federation.fingerprint.encode()):
        raise InputError(f"{where} was signed for another federation")
    missing = {CONFIG, WEIGHTS, RUN} - submission.files.keys()
    if missing:
        raise InputError(f"{where} lacks {', '.join(sorted(missing))}")
    check_sizes(submission.files, federation.charter.gate)
    for name in submission.files:
        folder, _, last = name.rpartition("/")
        if name not in PARTS and (folder != CHECKPOINTS or not last.endswith(".safetensors")):
            raise InputError(f"{where} has the file {printable(name, 60)}: only safetensors and JSON are accepted")
    return submission


def check_sizes(files: Files, gate: Gate) -> None:
    """Refuses files that are larger than the charter's limits; nothing is downloaded before this."""
    checkpoints = [name for name in files if name.startswith(f"{CHECKPOINTS}/")]
    if len(checkpoints) > gate.max_checkpoints:
        raise InputError(f"there are {len(checkpoints)} checkpoints, and the charter allows {gate.max_checkpoints}")
    for name, blob in files.items():
        limit = gate.max_weights if name == WEIGHTS else gate.max_checkpoint if name in checkpoints else gate.max_other
        if blob.size > limit:
            raise InputError(f"{name} has {blob.size:,} bytes, and the charter allows {limit:,}")


def check_license(charter: Charter, slot_license: str | None, license: str) -> None:
    """Refuses a licence that neither the slot nor the charter allows."""
    accepted = [slot_license] if slot_license else charter.gate.licenses
    if accepted is not None and license not in accepted:
        raise InputError(f"the licence {printable(license, 60)} is not accepted here: {', '.join(accepted)} is")


def summary(submission: Submission, **more: Any) -> dict[str, Any]:
    """Returns the signed metadata's summary of an accepted submission; TUF's JSON has no fractions."""
    return {
        "author": submission.author.key, "name": submission.author.name, "license": submission.license,
        "objective": submission.objective, "model": submission.model, "steps": submission.steps,
        "samples": submission.samples, "private": submission.private, **more,
    }  # fmt: skip
