"""The signed metadata of a federation, which assigns roles, by The Update Framework (python-tuf).

STORE/metadata/1.root.json        founders: who has which role, and how many of them must sign
STORE/metadata/N.targets.json     founders: the charter; and that verifiers accept experts
STORE/metadata/N.experts-HHHH.json  verifiers: the submission that has a slot, and those that had it before
STORE/metadata/N.snapshot.json, timestamp.json  one founder or verifier: which versions belong together, and until when
STORE/proposals/                  metadata that does not have enough signatures yet
STORE/blobs/SHA256.NAME, submissions/ID.SLOT.json, charter/SHA256.charter.json  what the metadata refers to

Each slot has metadata of its own (a bin of TUF's succinct roles), so that verifiers who accept experts of several slots
at once do not wait for each other: the next version is a function of the present one and of the submission alone, and
each verifier adds a signature to the same bytes. TUF's own client checks everything: signatures, that versions only
increase and belong together, and that the timestamp has not expired.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from atoll.errors import InputError, StoreError, printable, shown
from atoll.federation.charter import CHARTER, MAX_CHARTER, MAX_SLOTS, Blob, Charter, Files, Slot
from atoll.federation.keys import Identity, Person, home, key_of, library, unseal
from atoll.object_store import PART, StorePath, locked, open_store, place_of
from atoll.storage import cache_folder, make_folder, parse_json, reason_of, resolved, write_whole

if TYPE_CHECKING:
    from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp
    from tuf.ngclient import Updater

BASE = "store:///"
BINS, BITS = "experts", 14
LIFETIME = timedelta(days=3650)  # of all metadata but the timestamp
MAX_METADATA = 8 << 20  # bytes
MAX_SLOT = 1 << 20  # bytes of the card of a slot
MOST_OPENED = 2000  # contributors' slots, and proposals, that are read
KEPT = 20  # former submissions listed for a slot
NUM_REQUESTS = 16  # in flight at once
TRUSTED = "trusted.json"  # the root that this machine trusted first
NUM_TRIES = 200  # of a conditional write, each after somebody else's has succeeded


class FrozenError(InputError):
    """Raised when metadata has expired; anyone with a signing key can renew it."""


class UnsignedError(InputError):
    """Raised when too few of those who may sign metadata have signed it."""


class AlteredError(InputError):
    """Raised when a stored file is not the one that was signed; the original can be uploaded again."""


class Accepted(NamedTuple):
    """The expert that verifiers have signed for a slot."""

    slot: int
    submission: str  # SHA-256
    size: int  # of the manifest
    previous: tuple[str, ...]  # former submissions of the slot, the latest first
    about: Mapping[str, Any]  # author, objective, ...: known without reading the manifest


def url_of(place: str | Path) -> str:
    """Returns the URL of a store, given by URL or by a local folder."""
    path = place_of(place)
    return str(path).rstrip("/") if isinstance(path, StorePath) else f"file://{resolved(path)}"


def is_federation(place: str | Path) -> bool:
    """Returns whether a model's place is a federation: any URL, or a folder with a federation's metadata."""
    path = place_of(place)
    return isinstance(path, StorePath) or (path / "metadata" / "timestamp.json").is_file()


def fingerprint_of(root: bytes) -> str:
    """Returns the fingerprint of the first root, for people to compare: 128 bits of its SHA-256."""
    digest = hashlib.sha256(root).hexdigest()[:32]
    return " ".join(digest[i : i + 4] for i in range(0, 32, 4))


def path_of(slot: int) -> str:
    """Returns the name of the TUF target of a slot's expert."""
    return f"submissions/{slot:04d}.json"


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Federation:
    """A store, and what this machine trusts of it."""

    root: "Metadata[Root]"
    timestamp: "Metadata[Timestamp]"
    snapshot: "Metadata[Snapshot]"
    targets: "Metadata[Targets]"
    charter: Charter

    def __init__(self, url: str) -> None:
        library()
        self.url, self.store = url, open_store(url)
        self.place = url.removeprefix("file://")  # as shown to users
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.folder, self.cache = home() / "federations" / name, cache_folder() / "federations" / name
        self.revoked: dict[int, str] = {}  # slots whose expert is not signed by enough of the present verifiers
        self._prefetched: dict[str, bytes] = {}
        self._updater: Updater | None = None

    # --- trust ------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, place: str | Path, fingerprint: str | None = None, refresh: bool = True) -> "Federation":
        """Opens a federation. The first root seen is trusted from then on; it must have the `fingerprint`, if given."""
        federation = cls(url_of(place))
        federation.is_new = not (federation.folder / TRUSTED).exists()
        if federation.is_new:
            federation._trust(fingerprint)
        elif fingerprint is not None and _plain(fingerprint) != _plain(federation.fingerprint):
            raise InputError(f"{place} is trusted by the root {federation.fingerprint}, not by {fingerprint}")
        if refresh:
            federation.refresh()
        return federation

    is_new: bool

    def _trust(self, fingerprint: str | None) -> None:
        if self.url.startswith("file://") and not Path(self.place).is_dir():
            raise InputError(f"there is no folder {self.place}: give the URL or the folder of a federation")
        try:
            root = self.store.get("metadata/1.root.json", MAX_METADATA)
        except FileNotFoundError as error:
            raise InputError(
                f"{self.place} is no federation: check the URL, or `atoll federation create` one"
            ) from error
        if fingerprint is not None and _plain(fingerprint) != _plain(fingerprint_of(root)):
            raise InputError(
                f"the root of {self.place} is {fingerprint_of(root)}, not {fingerprint}: it is not the federation you "
                "mean, or its store is not to be trusted"
            )
        make_folder(self.folder)
        write_whole(self.folder / TRUSTED, lambda staged: staged.write_bytes(root))

    @property
    def fingerprint(self) -> str:
        return fingerprint_of((self.folder / TRUSTED).read_bytes())

    def refresh(self) -> None:
        """Reads the newest metadata and the charter, all of it checked by TUF's client."""
        from tuf.api.metadata import Metadata
        from tuf.ngclient import Updater, UpdaterConfig

        with locked(self.folder), self._sentences():
            self._updater = Updater(
                str(self.folder), f"{BASE}metadata", None, BASE, _fetcher(self),
                UpdaterConfig(targets_max_length=MAX_METADATA, snapshot_max_length=MAX_METADATA),
                bootstrap=(self.folder / TRUSTED).read_bytes(),
            )  # fmt: skip
            self._updater.refresh()
            read = {
                name: Metadata.from_file(str(self.folder / f"{name}.json"))
                for name in ("root", "timestamp", "snapshot", "targets")
            }
        self.root, self.timestamp, self.snapshot, self.targets = read.values()  # type: ignore[assignment]
        self._read_charter()

    def _read_charter(self) -> None:
        target = self.targets.signed.targets.get(CHARTER)
        if target is None or target.length > MAX_CHARTER:
            raise InputError(f"the founders of {self.place} have signed no charter: ask them")
        path = self.fetch(CHARTER, Blob(sha256=target.hashes["sha256"], size=target.length))
        try:
            self.charter = Charter.read(parse_json(path.read_bytes()), self.place)
        except ValueError as error:
            raise InputError(f"the charter of {self.place} cannot be read ({reason_of(error)})") from error

    def fetch(self, name: str, blob: Blob, path: Path | None = None, bar: "tqdm[Any] | None" = None) -> Path:
        """Returns a file of the store, downloaded unless cached; TUF's client checks its length and SHA-256."""
        from tuf.api.metadata import TargetFile

        path = path or self.cache / "files" / blob.sha256[:2] / f"{blob.sha256}.{name.rpartition('/')[2]}"
        if path.exists() and path.stat().st_size == blob.size:  # checked when downloaded
            if bar is not None:
                bar.update(blob.size)
            return path
        assert self._updater is not None
        target = TargetFile(blob.size, {"sha256": blob.sha256}, name)
        self._bar = bar
        with self._sentences(name):
            write_whole(path, lambda staged: self._updater.download_target(target, str(staged)))  # type: ignore[union-attr]
        return path

    _bar: "tqdm[Any] | None" = None

    def fetch_files(self, files: Files, folder: Path, what: str) -> None:
        """Downloads blobs to their places in a folder, with a progress bar."""
        total = sum(blob.size for blob in files.values())
        with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, leave=False, delay=1) as bar:
            for name, blob in files.items():
                self.fetch(f"blobs/{name.rpartition('/')[2]}", blob, folder / name, bar)

    def slots(self) -> dict[int, Slot]:
        """Returns the charter's slots, and those that contributors have opened, each signed by its author."""
        slots = {slot.number: slot for slot in self.charter.slots}
        if self.charter.open_slots:
            keys = [key for key, size in self.store.list("slots") if size <= MAX_SLOT][:MOST_OPENED]
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                for key, content in zip(keys, pool.map(self._get_slot, keys), strict=True):
                    with suppress(InputError):  # strangers can write there
                        slot = unseal(content, Slot, key)
                        if key == f"slots/{slot.number:04d}.json" and len(slots) < MAX_SLOTS:
                            slots.setdefault(slot.number, slot)
        return slots

    def _get_slot(self, key: str) -> bytes:
        return self.store.get(key, MAX_SLOT)

    def slot(self, number: int) -> Slot:
        if number < len(self.charter.slots):
            return self.charter.slots[number]
        try:
            key = f"slots/{number:04d}.json"
            slot = unseal(self._get_slot(key), Slot, key)
        except FileNotFoundError as error:
            last = len(self.charter.slots) - 1
            raise InputError(f"there is no slot {number} in {self.place}: the charter's are 0 to {last}") from error
        if slot.number != number:
            raise InputError(f"{key} is the card of slot {slot.number}: somebody has put it there")
        return slot

    def experts(self, slots: Iterable[int]) -> dict[int, Accepted]:
        """Returns the accepted experts of these slots; `revoked` lists those no longer signed by enough verifiers."""
        numbers = list(slots)
        roles = {number: self._bin(number) for number in numbers}
        with locked(self.folder):
            self._prefetch({role for role in roles.values() if f"{role}.json" in self.snapshot.signed.meta})
            found = {number: self._expert(number, roles[number]) for number in numbers}
        return {number: entry for number, entry in found.items() if entry is not None}

    def expert(self, slot: int) -> Accepted | None:
        return self.experts([slot]).get(slot)

    def _expert(self, slot: int, role: str) -> Accepted | None:
        assert self._updater is not None
        if f"{role}.json" not in self.snapshot.signed.meta:
            return None
        self.revoked.pop(slot, None)
        try:
            with self._sentences(role):
                target = self._updater.get_targetinfo(path_of(slot))
        except UnsignedError as error:
            self.revoked[slot] = str(error)
            return None
        if target is None:
            return None
        about = dict(target.custom or {})
        return Accepted(slot, target.hashes["sha256"], target.length, tuple(about.pop("previous", ())), about)

    def _bin(self, slot: int) -> str:
        delegations = self.targets.signed.delegations
        assert delegations is not None
        assert delegations.succinct_roles is not None
        return delegations.succinct_roles.get_role_for_target(path_of(slot))

    def _prefetch(self, roles: set[str]) -> None:
        """Downloads the metadata of several slots in parallel; TUF's client itself reads one after the other."""
        keys = []
        for role in roles:
            version = self.snapshot.signed.meta[f"{role}.json"].version
            with suppress(OSError, ValueError, KeyError, TypeError):
                if parse_json((self.folder / f"{role}.json").read_bytes())["signed"]["version"] == version:
                    continue
            keys.append(f"metadata/{version}.{role}.json")

        def get(key: str) -> None:
            with suppress(FileNotFoundError):
                self._prefetched[key] = self.store.get(key, MAX_METADATA)

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            list(pool.map(get, keys if len(keys) > 1 else ()))

    # --- roles ------------------------------------------------------------------------------------------------

    @property
    def verifiers(self) -> list[str]:
        """Returns the public keys of those who accept experts."""
        delegations = self.targets.signed.delegations
        assert delegations is not None
        return [key.keyval["public"] for key in delegations.keys.values()]

    @property
    def founders(self) -> list[str]:
        signed = self.root.signed
        return [signed.keys[keyid].keyval["public"] for keyid in signed.roles["root"].keyids]

    def signers(self, slot: int) -> list[str]:
        """Returns the public keys of the verifiers who have signed that a slot has its expert."""
        from tuf.api.metadata import Metadata

        role = self._bin(slot)
        metadata = Metadata.from_file(str(self.folder / f"{role}.json"))
        keys = self.targets.signed.delegations.keys  # type: ignore[union-attr]
        return [keys[keyid].keyval["public"] for keyid in self._valid(metadata, self.targets.signed, role)]

    @property
    def num_verdicts(self) -> int:
        """Returns how many verifiers must accept an expert."""
        return self.targets.signed.get_delegated_role(f"{BINS}-{0:04x}").threshold

    def require_verifier(self, identity: Identity) -> None:
        if identity.key not in self.verifiers:
            raise InputError(
                f"the key of {identity.person.name} is no verifier of {self.place}: ask a founder to run "
                f"`atoll federation verifiers {self.place} --add {identity.key}={identity.person.name}`"
            )

    @contextmanager
    def _sentences(self, what: str = "its metadata") -> Iterator[None]:
        """Converts errors of TUF's client to InputErrors of one sentence."""
        from securesystemslib.exceptions import StorageError
        from tuf.api import exceptions as tuf

        where = f"{self.place}: {printable(what, 100)}"
        try:
            yield
        except tuf.ExpiredMetadataError as error:
            raise FrozenError(
                f"{where} has expired, so its store may be frozen: ask a verifier to run `atoll federation verify "
                f"{self.place}`, or use another copy of the store"
            ) from error
        except tuf.BadVersionNumberError as error:
            raise InputError(
                f"{where} is of another version than what was signed or seen before ({printable(str(error), 120)}): "
                "its store shows old or mixed metadata"
            ) from error
        except tuf.UnsignedMetadataError as error:
            raise UnsignedError(
                f"{where} is not signed by enough of those who may ({printable(str(error), 120)}): it is forged, or "
                "who signed it was revoked"
            ) from error
        except tuf.DownloadHTTPError as error:
            raise AlteredError(f"{where} is missing from its store") from error
        except (tuf.LengthOrHashMismatchError, tuf.DownloadLengthMismatchError) as error:
            raise AlteredError(f"{where} is not the file that was signed: it was altered in the store") from error
        except (tuf.RepositoryError, tuf.DownloadError, StorageError, KeyError) as error:
            raise InputError(
                f"{where} cannot be read ({printable(str(error), 120)}): it is damaged or forged"
            ) from error
        except InputError:
            raise
        except OSError as error:
            raise InputError(f"cannot keep {what} of {self.place} ({reason_of(error)}): free the disk") from error

    # --- signing ----------------------------------------------------------------------------------------------

    @property
    def _expires(self) -> datetime:
        return datetime.fromisoformat(self.charter.created).replace(tzinfo=UTC) + LIFETIME

    def next_bin(self, slot: int, submission: tuple[str, int] | None, about: Mapping[str, Any]) -> "Metadata[Targets]":
        """Returns the metadata that would give a slot to a submission (id, size), or remove its expert.

        It depends on the present metadata and the arguments alone, so that verifiers sign the same bytes.
        """
        from tuf.api.metadata import Metadata, TargetFile, Targets

        role, path = self._bin(slot), path_of(slot)
        present = self.expert(slot)
        if f"{role}.json" in self.snapshot.signed.meta and slot not in self.revoked:
            signed = deepcopy(Metadata[Targets].from_file(str(self.folder / f"{role}.json")).signed)
            signed.version = self.snapshot.signed.meta[f"{role}.json"].version + 1
        else:
            known = self.snapshot.signed.meta.get(f"{role}.json")
            signed = Targets(version=1 if known is None else known.version + 1, expires=self._expires)
        signed.targets.pop(path, None)
        previous = [] if present is None else [present.submission, *present.previous]
        if submission is not None:
            digest, size = submission
            custom = {**about, "previous": [name for name in previous if name != digest][:KEPT]}
            signed.targets[path] = TargetFile(size, {"sha256": digest}, path, {"custom": custom})
        return Metadata(signed)

    def sign_bin(self, identity: Identity, slot: int, metadata: "Metadata[Targets]") -> tuple[int, bool]:
        """Signs metadata of a slot; returns the number of signatures, and whether they sufficed to publish it."""
        role = self._bin(slot)
        signed = self._propose(identity, role, metadata, self.targets.signed)
        num = len(self._valid(signed, self.targets.signed, role))
        return num, num >= self.num_verdicts and self._publish(identity, role, signed)

    def _propose(self, identity: Identity, role: str, metadata: Any, delegator: Any) -> Any:
        """Adds a signature to the proposal in the store, or creates it; returns it with all valid signatures."""
        from tuf.api.metadata import Metadata

        key = f"proposals/{role}.{metadata.signed.version}.{sha256_of(metadata.signed_bytes)[:16]}.json"
        for _ in range(NUM_TRIES):
            etag, signed = "", deepcopy(metadata)
            signed.sign(identity.signer, append=True)
            with suppress(FileNotFoundError, StoreError):
                content, etag = self.store.read(key, MAX_METADATA)
                with suppress(Exception):  # strangers can write anything there
                    other = Metadata.from_bytes(content)
                    if other.signed_bytes == metadata.signed_bytes:
                        signed.signatures |= self._valid(other, delegator, role)
            if self.store.replace(key, signed.to_bytes(), etag) if etag else self.store.create(key, signed.to_bytes()):
                return signed
            with suppress(FileNotFoundError):  # False may mean that an earlier attempt succeeded
                if self.store.get(key, MAX_METADATA) == signed.to_bytes():
                    return signed
        raise InputError(f"{self.place}/{key} changes all the time: try again later")

    def _valid(self, metadata: Any, delegator: Any, role: str) -> dict[str, Any]:
        """Returns the valid signatures."""
        result = delegator.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
        return {keyid: metadata.signatures[keyid] for keyid in result.signed}

    def _publish(self, identity: Identity, role: str, metadata: Any) -> bool:
        """Publishes metadata that enough have signed; returns False if another version came first."""
        from tuf.api.metadata import Metadata

        version, delegator = metadata.signed.version, self.root.signed if role == "targets" else self.targets.signed
        key, content = f"metadata/{version}.{role}.json", metadata.to_bytes()
        if not self.store.create(key, content):
            with suppress(Exception):
                other = Metadata.from_bytes(self.store.get(key, MAX_METADATA))
                delegator.verify_delegate(role, other.signed_bytes, other.signatures)
                if other.signed_bytes != metadata.signed_bytes and other.signed.version == version:
                    self.sign_snapshot(identity, {role: version})  # in case its publisher was killed
                    return False
            self.store.put(key, content)  # what was there is not signed, or has fewer signatures
        self.sign_snapshot(identity, {role: version})
        return True

    def sign_snapshot(self, identity: Identity, versions: Mapping[str, int], refresh: bool = True) -> None:
        """Signs a snapshot that has these versions of roles."""
        from tuf.api.metadata import Metadata, MetaFile, Snapshot

        for _ in range(NUM_TRIES):
            if refresh:
                self.refresh()
            present = self.snapshot.signed
            meta = {name: MetaFile(file.version) for name, file in present.meta.items()}
            newer = {f"{role}.json": version for role, version in versions.items()}
            if all(name in meta and meta[name].version >= version for name, version in newer.items()):
                return
            meta |= {name: MetaFile(version) for name, version in newer.items()}
            snapshot = Metadata(Snapshot(present.version + 1, expires=self._expires, meta=dict(sorted(meta.items()))))
            snapshot.sign(identity.signer)
            key = f"metadata/{present.version + 1}.snapshot.json"
            if not self.store.create(key, snapshot.to_bytes()):
                if (other := self._snapshot_at(key, present.version + 1)) is None:
                    self.store.put(key, snapshot.to_bytes())
                else:
                    snapshot = other  # of another publisher, perhaps a killed one: it stands, and ours comes next
            self._stamp(identity, snapshot.signed.version)
            self.snapshot, refresh = snapshot, True
        raise InputError(f"the metadata of {self.place} changes all the time: try again later")

    def _snapshot_at(self, key: str, version: int) -> "Metadata[Snapshot] | None":
        """Returns a snapshot of the store; None unless it is validly signed."""
        from tuf.api.metadata import Metadata, Snapshot

        with suppress(Exception):
            snapshot = Metadata[Snapshot].from_bytes(self.store.get(key, MAX_METADATA))
            self.root.signed.verify_delegate("snapshot", snapshot.signed_bytes, snapshot.signatures)
            if snapshot.signed.version == version:
                return snapshot
        return None

    def _stamp(self, identity: Identity, snapshot: int) -> bool:
        """Signs a timestamp for a snapshot; returns False if somebody else has signed one meanwhile."""
        from tuf.api.metadata import Metadata, MetaFile, Timestamp

        content, etag = self.store.read("metadata/timestamp.json", MAX_METADATA)
        version = self.timestamp.signed.version
        with suppress(Exception):
            other = Metadata[Timestamp].from_bytes(content)
            self.root.signed.verify_delegate("timestamp", other.signed_bytes, other.signatures)
            version = max(version, other.signed.version)
            snapshot = max(snapshot, other.signed.snapshot_meta.version)
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=self.charter.fresh)
        stamp = Metadata(Timestamp(version + 1, expires=expires, snapshot_meta=MetaFile(snapshot)))
        stamp.sign(identity.signer)
        return self.store.replace("metadata/timestamp.json", stamp.to_bytes(), etag)

    def renew(self, identity: Identity) -> None:
        """Renews the timestamp if half of its time is over, if it has expired, or if its signer was revoked."""
        from tuf.api.metadata import Metadata

        try:
            self.refresh()
            left = self.timestamp.signed.expires - datetime.now(UTC)
            if left < timedelta(seconds=self.charter.fresh / 2):
                self._stamp(identity, self.snapshot.signed.version)
                self.refresh()
            return
        except (FrozenError, UnsignedError):
            if not all((self.folder / f"{name}.json").exists() for name in ("timestamp", "snapshot", "targets")):
                raise
        read = [
            Metadata.from_file(str(self.folder / f"{name}.json"))
            for name in ("root", "timestamp", "snapshot", "targets")
        ]
        self.root, self.timestamp, self.snapshot, self.targets = read  # type: ignore[assignment]
        self._read_charter()
        roles = self.root.signed.roles
        if identity.keyid not in roles["timestamp"].keyids:
            raise UnsignedError(
                f"the timestamp of {self.place} is not valid, and this key may not sign one: ask a verifier"
            )
        with suppress(Exception):  # the store may have newer ones that have expired too
            stamp: Any = Metadata.from_bytes(self.store.get("metadata/timestamp.json", MAX_METADATA))
            self.root.signed.verify_delegate("timestamp", stamp.signed_bytes, stamp.signatures)
            version = stamp.signed.snapshot_meta.version
            if stamp.signed.version >= self.timestamp.signed.version:
                newer = self._snapshot_at(f"metadata/{version}.snapshot.json", version)
                self.timestamp, self.snapshot = stamp, newer or self.snapshot
        versions = {name.removesuffix(".json"): file.version for name, file in self.snapshot.signed.meta.items()}
        self.snapshot.signed.meta = {}
        self.sign_snapshot(identity, versions, refresh=False)
        self.refresh()

    def finish_proposals(self, identity: Identity) -> int:
        """Publishes what enough have signed, in case its last signer was killed; removes outdated proposals."""
        from tuf.api.metadata import Metadata

        num = 0
        for key, size in self.store.list("proposals")[:MOST_OPENED]:
            role, _, rest = key.removeprefix("proposals/").partition(".")
            known = self.snapshot.signed.meta.get(f"{role}.json")
            version = rest.partition(".")[0]
            if role == "root" or not version.isdecimal() or size > MAX_METADATA:
                continue
            if known is not None and int(version) <= known.version:
                self.store.delete(key)
                continue
            with suppress(InputError, FileNotFoundError):
                delegator: Any = self.root.signed if role == "targets" else self.targets.signed
                try:
                    metadata = Metadata.from_bytes(self.store.get(key, MAX_METADATA))
                    delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
                except InputError:
                    raise
                except Exception:
                    continue  # too few signatures so far, or no metadata at all
                num += self._publish(identity, role, metadata)
        return num


def _plain(fingerprint: str) -> str:
    return "".join(fingerprint.split()).lower()


def _fetcher(federation: Federation) -> Any:
    """Returns a fetcher with which TUF's client reads from an object store."""
    from tuf.api.exceptions import DownloadHTTPError
    from tuf.ngclient import FetcherInterface

    class StoreFetcher(FetcherInterface):
        def _fetch(self, url: str) -> Iterator[bytes]:
            key = url.removeprefix(BASE)
            try:
                if key in federation._prefetched:
                    yield federation._prefetched.pop(key)
                elif key.startswith("metadata/"):
                    yield federation.store.get(key, MAX_METADATA)
                else:
                    size, etag = federation.store.head(key)
                    for start in range(0, size, PART):
                        part = federation.store.get_range(key, start, min(PART, size - start), etag)
                        if federation._bar is not None:
                            federation._bar.update(len(part))
                        yield part
            except FileNotFoundError as error:
                raise DownloadHTTPError(f"there is no {shown(key)}", 404) from error

    return StoreFetcher()


# --- founders -----------------------------------------------------------------------------------------------------


def found(url: str, identity: Identity, charter: Charter, verifiers: list[Person], num_verdicts: int) -> Federation:
    """Writes the first metadata, the root last: until it exists, there is no federation."""
    from tuf.api.metadata import (
        Delegations,
        Metadata,
        MetaFile,
        Root,
        Snapshot,
        SuccinctRoles,
        TargetFile,
        Targets,
        Timestamp,
    )  # fmt: skip

    federation = Federation(url)
    store, expires = federation.store, datetime.fromisoformat(charter.created).replace(tzinfo=UTC) + LIFETIME
    content = charter.model_dump_json().encode()
    store.put(f"charter/{sha256_of(content)}.charter.json", content)
    keys = {person.key: key_of(person.key) for person in verifiers}
    own = identity.signer.public_key
    root = Root(expires=expires, consistent_snapshot=True)
    for role in ("root", "targets", "snapshot", "timestamp"):
        root.add_key(own, role)
        for key in keys.values() if role in ("snapshot", "timestamp") else ():
            root.add_key(key, role)
    bins = SuccinctRoles([key.keyid for key in keys.values()], num_verdicts, BITS, BINS)
    targets = Targets(
        expires=expires,
        targets={CHARTER: TargetFile.from_data(CHARTER, content, ["sha256"])},
        delegations=Delegations({key.keyid: key for key in keys.values()}, succinct_roles=bins),
    )
    fresh = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=charter.fresh)
    parts: dict[str, Any] = {
        "1.targets": targets,
        "1.snapshot": Snapshot(expires=expires, meta={"targets.json": MetaFile(1)}),
        "timestamp": Timestamp(expires=fresh, snapshot_meta=MetaFile(1)),
        "1.root": root,
    }
    for name, signed in parts.items():
        metadata = Metadata(signed)
        metadata.sign(identity.signer)
        write: Callable[[str, bytes], object] = store.create if name == "1.root" else store.put
        write(f"metadata/{name}.json", metadata.to_bytes())
    with suppress(OSError):
        (federation.folder / TRUSTED).unlink()  # of an earlier federation at the same URL
    return Federation.open(url, fingerprint_of(metadata.to_bytes()))


def change_roles(
    federation: Federation,
    identity: Identity,
    charter: Charter,
    *,
    verifiers: list[Person],
    founders: list[Person],
    num_verdicts: int,
    num_founders: int,
) -> list[str]:
    """Proposes and signs new roles and a new charter; publishes them if enough founders have signed."""
    from tuf.api.metadata import Delegations, Metadata, Role, SuccinctRoles, TargetFile

    if not 1 <= num_verdicts <= len(verifiers):
        raise InputError(f"{num_verdicts} verdicts are needed, but there would be {len(verifiers)} verifiers")
    if not 1 <= num_founders <= len(founders):
        raise InputError(f"{num_founders} founders must sign, but there would be {len(founders)} of them")
    content = charter.model_dump_json().encode()
    federation.store.put(f"charter/{sha256_of(content)}.charter.json", content)
    voters: dict[str, Any] = {key.keyid: key for key in (key_of(person.key) for person in verifiers)}
    owners: dict[str, Any] = {key.keyid: key for key in (key_of(person.key) for person in founders)}
    root = deepcopy(federation.root.signed)
    root.version += 1
    root.keys = {**voters, **owners}
    for role in ("root", "targets"):
        root.roles[role] = Role(list(owners), num_founders)
    for role in ("snapshot", "timestamp"):
        root.roles[role] = Role(list(dict.fromkeys((*owners, *voters))), 1)
    targets = deepcopy(federation.targets.signed)
    targets.version += 1
    targets.targets[CHARTER] = TargetFile.from_data(CHARTER, content, ["sha256"])
    targets.delegations = Delegations(voters, succinct_roles=SuccinctRoles(list(voters), num_verdicts, BITS, BINS))
    if new_root := root.to_dict() | {"version": 0} != federation.root.signed.to_dict() | {"version": 0}:
        federation._propose(identity, "root", Metadata(root), root)
    if new_root or targets.to_dict() | {"version": 0} != federation.targets.signed.to_dict() | {"version": 0}:
        federation._propose(identity, "targets", Metadata(targets), root)  # by as many founders as the new root demands
    return finish_roles(federation, identity)


def sign_roles(federation: Federation, identity: Identity) -> list[str]:
    """Adds a founder's signature to what other founders have proposed."""
    from tuf.api.metadata import Metadata

    for key, _ in federation.store.list("proposals"):
        role = key.removeprefix("proposals/").partition(".")[0]
        if role in ("root", "targets"):
            metadata: Any = Metadata.from_bytes(federation.store.get(key, MAX_METADATA))
            delegator = metadata.signed if role == "root" else _coming_root(federation)
            federation._propose(identity, role, metadata, delegator)
    return finish_roles(federation, identity)


def _coming_root(federation: Federation) -> Any:
    from tuf.api.metadata import Metadata

    version = federation.root.signed.version + 1
    for key, _ in federation.store.list("proposals"):
        if key.startswith(f"proposals/root.{version}."):
            return Metadata.from_bytes(federation.store.get(key, MAX_METADATA)).signed
    return federation.root.signed


def finish_roles(federation: Federation, identity: Identity) -> list[str]:
    """Publishes what enough founders have signed: the root first, then the targets that it validates."""
    from tuf.api.metadata import Metadata

    lines, versions, waiting = list[str](), dict[str, int](), False
    for role in ("root", "targets"):
        present: Any = federation.root if role == "root" else federation.targets
        for key, _ in federation.store.list("proposals"):
            if not key.startswith(f"proposals/{role}."):
                continue
            metadata: Any = Metadata.from_bytes(federation.store.get(key, MAX_METADATA))
            version = metadata.signed.version
            if version != present.signed.version + 1:
                federation.store.delete(key)
                continue
            if role == "root":
                result: Any = metadata.signed.get_root_verification_result(
                    federation.root.signed, metadata.signed_bytes, metadata.signatures
                )
            else:
                result = federation.root.signed.get_verification_result(
                    role, metadata.signed_bytes, metadata.signatures
                )
            if not result.verified or waiting:
                lines.append(
                    f"{role} version {version} waits for more founders: `atoll federation sign {federation.place}`"
                )
                waiting = True  # targets proposed with a new root come after it
                continue
            federation.store.put(f"metadata/{version}.{role}.json", metadata.to_bytes())
            federation.store.delete(key)
            lines.append(f"{role} version {version} is signed by enough founders and published")
            if role == "root":
                federation.root = metadata
            else:
                versions = {role: version}
            break
    if any("published" in line for line in lines):
        # Whoever signed the last snapshot and timestamp may be revoked by now, so both are signed again.
        others = {name.removesuffix(".json"): file.version for name, file in federation.snapshot.signed.meta.items()}
        federation.snapshot.signed.meta = {}
        federation.sign_snapshot(identity, {**others, **versions}, refresh=False)
        federation.refresh()
    return lines
