"""Identities: an Ed25519 key in a file that only its owner can read, and statements signed with it.

Keys, signatures and envelopes (DSSE) are securesystemslib's. A person is identified by the public key; the name beside
it is self-chosen.
"""

import json
import os
import re
import stat
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator

from atoll.cards import Card
from atoll.errors import InputError, printable, shown
from atoll.storage import make_folder, parse_json, read_bytes, read_json, reason_of, write_json

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

KEY, PERSON = "key.pem", "person.json"
MAX_KEY = 1 << 14  # bytes
MAX_NAME = 80


def _hex(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError(f"must be 64 hexadecimal digits, but is {shown(text)}")
    return text


def _name(text: str) -> str:
    if not text.strip() or len(text) > MAX_NAME or printable(text) != text:
        raise ValueError(f"must be a name of up to {MAX_NAME} letters, but is {shown(text)}")
    return text


PublicKey = Annotated[str, AfterValidator(_hex)]  # of Ed25519
Digest = Annotated[str, AfterValidator(_hex)]  # SHA-256
C = TypeVar("C", bound=Card)


class Person(Card):
    """A person, identified by public key; the name is their own choice and proves nothing."""

    key: PublicKey
    name: Annotated[str, AfterValidator(_name)]

    @classmethod
    def named(cls, text: str) -> "Person":
        """Returns the person of KEY or KEY=NAME, as `atoll federation join` prints it."""
        key, _, name = text.strip().partition("=")
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise InputError(f"{shown(text)} is no public key: give the one that `atoll federation join` has shown")
        return cls.parse({"key": key, "name": name or key[:8]}, "the person")


def library() -> ModuleType:
    """Returns securesystemslib's signers; raises InputError if they are not installed."""
    try:
        import tuf  # noqa: F401
        from securesystemslib import signer
    except ImportError as error:
        raise InputError("a federation needs python-tuf: pip install 'atoll[federation]'") from error
    return signer


def home() -> Path:
    """Returns the folder of keys and trusted roots: ATOLL_HOME, or atoll in the configuration folder."""
    if given := os.environ.get("ATOLL_HOME"):
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "atoll"


class Identity:
    """This machine's own key. Its secret stays in the file: it is never shown and never uploaded."""

    def __init__(self, person: Person, signer: "CryptoSigner") -> None:
        self.person, self.signer = person, signer

    @property
    def key(self) -> str:
        return self.person.key

    @property
    def keyid(self) -> str:
        return str(self.signer.public_key.keyid)

    @classmethod
    def load(cls) -> "Identity":
        """Returns the key of this machine; raises InputError if there is none, or if others can read it."""
        library()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.signer import CryptoSigner

        path = home() / KEY
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InputError(f"{path} can be read by others: chmod 600 {path}, or make a new key if they have it")
        try:
            private = load_pem_private_key(read_bytes(path, MAX_KEY), None)
            signer = CryptoSigner(private)
        except FileNotFoundError as error:
            raise InputError("there is no key on this machine: run `atoll federation join URL` first") from error
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} is no key that can be used: restore it, or move it and join again") from error
        about = read_json(path.with_name(PERSON), "run `atoll federation join URL --name NAME`")
        person = Person.parse({"key": signer.public_key.keyval["public"], "name": about.get("name")}, PERSON)
        return cls(person, signer)

    @classmethod
    def load_or_make(cls, name: str | None = None) -> "Identity":
        """Returns the key of this machine; makes one if there is none. A `name` replaces the stored one."""
        library()
        from securesystemslib.signer import CryptoSigner

        path = home() / KEY
        if not path.exists():
            make_folder(path.parent)
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "wb") as file:
                    file.write(CryptoSigner.generate_ed25519().private_bytes)
                    os.fsync(file.fileno())
            except FileExistsError:
                pass  # another process has just made it
            except OSError as error:
                raise InputError(
                    f"cannot write {path} ({reason_of(error)}): set ATOLL_HOME to another folder"
                ) from error
        if name is not None or not path.with_name(PERSON).exists():
            Person.parse({"key": "0" * 64, "name": name or "anonymous"}, "the person")
            write_json(path.with_name(PERSON), {"name": name or "anonymous"})
        return cls.load()


def key_of(public: str) -> "SSlibKey":
    """Returns a public key for python-tuf; its id is derived from the key, so that nobody can claim another's."""
    library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from securesystemslib.signer import SSlibKey

    return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)))


# --- statements ---------------------------------------------------------------------------------------------------


def seal(card: Card, identity: Identity) -> bytes:
    """Returns a card, which names its `author`, as a signed envelope; the bytes are deterministic."""
    from securesystemslib.dsse import Envelope

    payload = json.dumps(card.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, allow_nan=False)
    envelope = Envelope(payload.encode(), _type_of(type(card)), {})
    envelope.sign(identity.signer)
    return json.dumps(envelope.to_dict(), sort_keys=True).encode()


def unseal(content: bytes, kind: type[C], where: str) -> C:
    """Returns the card in an envelope; raises InputError unless its author has signed it."""
    library()
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError

    try:
        envelope = Envelope.from_dict(parse_json(content))
        values: Any = parse_json(envelope.payload)
    except Exception as error:
        raise InputError(f"{where} is no signed statement ({printable(reason_of(error), 100)})") from error
    if envelope.payload_type != _type_of(kind):
        raise InputError(f"{where} is a signed {shown(envelope.payload_type)}, not {_type_of(kind)}")
    card = kind.parse(values, where)
    author: Person = card.author  # type: ignore[attr-defined]
    try:
        envelope.verify([key_of(author.key)], 1)
    except (VerificationError, ValueError) as error:
        raise InputError(f"the signature of {where} is not that of {author.name} ({author.key[:8]}): forged") from error
    return card


def _type_of(kind: type[Card]) -> str:
    return f"application/vnd.atoll.{kind.__name__.lower()}+json"
